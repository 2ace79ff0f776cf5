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


def test_resident_memory_is_in_bytes() -> None:
    assert 10**6 < _resident_bytes() < 10**12
