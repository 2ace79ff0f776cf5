"""What a rank answers while its main thread is busy."""

import threading

from nbdist.engine.rank.control import _resident_bytes, stacks


def test_stacks_name_the_threads_and_where_they_are() -> None:
    here, go = threading.Event(), threading.Event()

    def wait_for_it() -> None:
        here.set()
        go.wait(30)

    thread = threading.Thread(target=wait_for_it, name="waits")
    thread.start()
    here.wait(30)
    try:
        found = stacks()
    finally:
        go.set()
        thread.join()
    assert "wait_for_it" in found["waits"]
    assert "test_stacks_name_the_threads" in found["MainThread"]


def test_threads_of_one_name_have_a_stack_each_and_recursion_stands_below_its_frame() -> None:
    here, go = threading.Semaphore(0), threading.Event()

    def down(levels: int) -> None:
        if levels:
            return down(levels - 1)
        here.release()
        go.wait(30)

    threads = [threading.Thread(target=down, args=(9,), name="worker") for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert all(here.acquire(timeout=30) for _ in threads)
        found = [text for name, text in stacks().items() if name.startswith("worker")]
    finally:
        go.set()
        for thread in threads:
            thread.join()
    assert len(found) == 3
    lines = found[0].splitlines()
    (repeated,) = [at for at, line in enumerate(lines) if "more times]" in line]
    assert "in down" in "".join(lines[repeated - 3 : repeated])


def test_resident_memory_is_in_bytes() -> None:
    assert 10**6 < _resident_bytes() < 10**12
