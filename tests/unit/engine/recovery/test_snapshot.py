import math

from nbdist.engine.recovery import snapshot_schedule as schedule


def test_snapshots_are_thirty_seconds_apart_or_take_one_percent_of_the_time() -> None:
    assert schedule.next_at(1000.0, 0.1) == 1030.0
    assert schedule.next_at(1000.0, 2.0) == 1200.0


def test_a_snapshot_is_announced_so_early_that_ranks_which_look_once_a_second_hear_of_it() -> None:
    assert schedule.margin(0.01) * 0.01 > 2 * schedule.POLL_S
    assert schedule.margin(10.0) == 3


def test_one_slow_step_does_not_let_a_snapshot_be_announced_too_late() -> None:
    known = math.inf
    for step_s in (0.5, 0.01, 0.01, 2.0):
        known = schedule.shortest(known, step_s)
    assert known < 0.011


def test_a_snapshot_over_half_of_the_free_memory_is_refused_in_a_sentence() -> None:
    assert schedule.refusal(1_000_000_000, 4_000_000_000, ranks=2) is None
    why = schedule.refusal(1_000_000_001, 4_000_000_000, ranks=2)
    assert why is not None
    assert "would take 2.0 GB on this machine, more than half of the 4.0 GB that are free" in why
