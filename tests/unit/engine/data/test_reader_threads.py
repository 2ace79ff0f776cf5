"""How many threads read, and what they do first."""

import threading

import pytest

from nbdist.engine.data.reading.reader_threads import ReaderThreads, wanted


@pytest.mark.parametrize(
    ("is_far", "cores", "threads"),
    [(False, 0.5, 2), (False, 2.0, 2), (False, 3.9, 3), (False, 64.0, 4), (True, 0.5, 4)],
)
def test_decoding_takes_no_more_threads_than_cores_and_a_store_four(
    is_far: bool, cores: float, threads: int
) -> None:
    assert wanted(is_far, cores) == threads


def test_what_is_urgent_is_done_before_what_waits() -> None:
    done: list[str] = []
    may_go = threading.Event()
    threads = ReaderThreads(1)
    threads.submit(may_go.wait)
    threads.submit(lambda: done.append("first"))
    last = threads.submit(lambda: done.append("second"))
    threads.submit(lambda: done.append("urgent"), is_urgent=True)
    may_go.set()
    last.result(10)
    threads.close()
    assert done == ["urgent", "first", "second"]
