import os
import sys
import threading
from collections.abc import Callable

import pytest

from nbdist.shared import background
from nbdist.shared.background import CoreWaits, lower_thread, pause_s, waiting_under

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def on_a_thread(work: Callable[[], int]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(10)
    return found[0]


@needs_linux
def test_a_thread_lowers_itself_and_no_other() -> None:
    before = niceness()

    def work() -> int:
        lower_thread()
        return niceness()

    assert on_a_thread(work) == max(before, background.THREAD_NICE)
    assert niceness() == before
    assert on_a_thread(niceness) == before


@needs_linux
def test_a_thread_that_is_lower_already_is_not_raised() -> None:
    def work() -> int:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
        lower_thread()
        return niceness()

    assert on_a_thread(work) == 15


@needs_linux
def test_the_main_thread_stays_as_it_is() -> None:
    before = niceness()

    lower_thread()

    assert niceness() == before


def test_with_cores_to_spare_the_pause_is_the_usual_one() -> None:
    assert pause_s(0.3, 0.01, 0.1, 0.0) == 0.3


def test_work_that_takes_long_rests_until_it_has_taken_its_share() -> None:
    assert pause_s(0.3, 0.1, 0.1, 0.0) == pytest.approx(0.9)


def test_the_pause_grows_with_the_waiting_for_a_core_up_to_two_seconds() -> None:
    pauses = [pause_s(0.3, 0.01, 0.1, waiting / 10) for waiting in range(11)]

    assert pauses == sorted(pauses)
    assert pauses[1] > 0.3
    assert pauses[-1] == background.LONGEST_S


def test_a_pause_that_is_usually_longer_is_not_made_shorter() -> None:
    assert pause_s(5.0, 0.01, 0.1, 1.0) == 5.0


def test_of_a_load_above_the_cores_threads_wait_their_part() -> None:
    assert waiting_under(0.0, 2) == waiting_under(2.0, 2) == 0.0
    assert waiting_under(4.0, 2) == 0.5


def test_what_a_thread_waited_for_a_core_counts_and_fades(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([(0, 0), (100, 300), (200, 300), (300, 300)])
    monkeypatch.setattr(background, "thread_ns", lambda: next(told))
    waits = CoreWaits()

    assert waits.share() == 0.75
    assert waits.share() == 0.5
    assert waits.share() == pytest.approx(0.3)


def test_where_a_thread_does_not_know_its_waits_the_load_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "thread_ns", lambda: None)
    monkeypatch.setattr(os, "getloadavg", lambda: (8.0, 0.0, 0.0), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)

    assert CoreWaits().share() == 0.75


@needs_linux
def test_linux_tells_a_thread_its_waits() -> None:
    assert background.thread_ns() is not None
