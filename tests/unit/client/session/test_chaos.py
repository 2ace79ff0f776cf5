import itertools
import threading

import pytest

from nbdist.client.session.chaos import ChaosPlan, Fault, Stopwatch, schedule
from nbdist.client.session.chaos_report import report, within

KINDS = ("kill", "stop", "raise")


def test_a_plan_strikes_at_even_times_until_its_time_is_over() -> None:
    plan = ChaosPlan(("kill",), (2,), every_s=5.0, for_s=16.0)

    assert list(schedule(plan)) == [Fault(at, "kill", 2) for at in (5.0, 10.0, 15.0)]


def test_a_plan_strikes_as_often_as_it_says() -> None:
    assert len(list(schedule(ChaosPlan(KINDS, (0, 1), faults=7)))) == 7


def test_a_plan_without_an_end_goes_on() -> None:
    assert len(list(itertools.islice(schedule(ChaosPlan(KINDS, (0, 1))), 1000))) == 1000


def test_the_same_seed_strikes_alike_and_another_does_not() -> None:
    first, again, other = (
        list(schedule(ChaosPlan(KINDS, (0, 1, 2, 3), faults=50, seed=seed))) for seed in (1, 1, 2)
    )

    assert first == again
    assert first != other
    assert {fault.kind for fault in first} == set(KINDS)
    assert {fault.rank for fault in first} == {0, 1, 2, 3}


def test_the_clock_of_the_schedule_stands_while_no_cell_runs() -> None:
    watch = Stopwatch()
    reached = threading.Event()

    def wait() -> None:
        if watch.wait_until(0.01):
            reached.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not reached.wait(0.1)
    watch.cell_begun()
    assert reached.wait(30)
    thread.join()


def test_its_end_ends_every_wait() -> None:
    watch = Stopwatch()
    answers: list[bool] = []
    threads = [
        threading.Thread(target=lambda: answers.append(watch.wait_until(1e6))),
        threading.Thread(target=lambda: answers.append(watch.wait_for(1e6))),
    ]
    for thread in threads:
        thread.start()

    watch.end()

    for thread in threads:
        thread.join(30)
    assert answers == [False, False]
    assert not watch.wait_for(1e6)


# The first cell fails by a kill, and another fault strikes while it recovers; the second is slowed.
EVENTS = [
    {"s": 1.0, "event": "cell begun", "number": 1},
    {"s": 6.0, "event": "fault", "cause": "kill", "rank": 1},
    {"s": 6.5, "event": "fault", "cause": "raise", "rank": 2},
    {"s": 6.6, "event": "fault missed", "cause": "kill", "rank": 1},
    {"s": 7.5, "event": "re-formed", "generation": 1},
    {"s": 8.0, "event": "cell ended", "outcome": "failed", "steps": {"0": 50, "1": 0, "2": 49}},
    {"s": 8.1, "event": "cell begun", "number": 2},
    {"s": 9.0, "event": "fault", "cause": "slow", "rank": 0},
    {"s": 18.1, "event": "cell ended", "outcome": "finished", "steps": {"0": 80, "1": 80, "2": 80}},
]


def test_a_report_counts_faults_cells_and_steps() -> None:
    told = report(EVENTS)

    assert told.faults == {"kill": 1, "raise": 1, "slow": 1}
    assert told.missed == 1
    assert (told.cells, told.failed, told.lost_sessions) == (2, 1, 0)
    assert told.recoveries_s == (2.0,)
    assert told.running_s == pytest.approx(17.0)
    assert (told.steps_done, told.steps_kept, told.goodput) == (130, 130, 1.0)


def test_steps_that_a_recovery_took_back_are_not_kept() -> None:
    events = [dict(event) for event in EVENTS]
    events[4]["steps_lost"] = 13

    told = report(events)

    assert (told.steps_done, told.steps_kept, told.goodput) == (130, 117, 0.9)


def test_a_broken_cluster_is_a_lost_session() -> None:
    assert report([*EVENTS, {"s": 20.0, "event": "broken"}]).lost_sessions == 1


def test_a_cell_that_failed_of_its_own_is_no_recovery() -> None:
    told = report(
        [
            {"s": 1.0, "event": "cell begun", "number": 1},
            {"s": 2.0, "event": "cell ended", "outcome": "failed", "steps": {"0": 0}},
        ]
    )

    assert (told.cells, told.failed, told.recoveries_s) == (1, 0, ())


def test_a_report_reads_as_text() -> None:
    assert str(report(EVENTS)).splitlines() == [
        "Faults:    3 (1 kill, 1 raise, 1 slow); 1 found no living rank",
        "Cells:     2 attempts, 1 failed by these faults",
        "Sessions:  none lost",
        "Steps:     130 kept of 130, 100.0%",
        "Recovery:  median 2.00 s, 95 % within 2.00 s, longest 2.00 s; 2.0 s of 17.0 s",
    ]


def test_nothing_at_all_is_a_report_too() -> None:
    assert str(report([])).splitlines()[0] == "Faults:    0"


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2.0), (0.95, 4.0), (0.0, 1.0), (1.0, 4.0)])
def test_a_share_of_numbers_lies_within(share: float, expected: float) -> None:
    assert within([1.0, 2.0, 3.0, 4.0], share) == expected
