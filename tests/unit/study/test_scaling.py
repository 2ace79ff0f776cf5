"""Speed-up, efficiency and where it is lost, from worlds whose parts are planted."""

from typing import Literal

import pytest

from nbdist.shared.errors import UsageError
from nbdist.study.forecast import fit
from nbdist.study.scaling import (
    Call,
    World,
    fixed_work_s,
    kind_of,
    late_s,
    on_ranks,
    points,
    traffic,
)
from nbdist.study.step_time import StepTime
from tests.unit.study.planted import planted


@pytest.mark.parametrize("kind", ["strong", "weak"])
def test_losses_sum_to_what_efficiency_lacks(kind: Literal["strong", "weak"]) -> None:
    for point in points([planted(n, kind) for n in (1, 2, 4, 8)], kind):
        assert sum(point.lost.values()) == pytest.approx(1 - point.efficiency, abs=1e-12)


def test_losses_are_the_parts_that_were_planted() -> None:
    """80 ms of parallel work and 20 ms of serial, on 4 ranks: 40 ms and what else is planted."""
    one = World(1, StepTime(0.080, loader_s=0.004, serial_s=0.020))
    four = World(4, StepTime(0.020, 0.010, loader_s=0.003, skew_s=0.005, serial_s=0.020))
    point = points([one, four], "strong")[1]
    lost_s = {name: share * point.step_s for name, share in point.lost.items()}
    assert lost_s == pytest.approx(
        {"communication": 0.010, "skew": 0.005, "loader": 0.002, "serial": 0.015, "cores": 0}
    )
    assert point.speed_up == pytest.approx(0.104 / 0.058)


def test_a_step_that_shrinks_with_the_ranks_loses_nothing() -> None:
    ranks = [World(n, StepTime(0.1 / n)) for n in (1, 2, 4)]
    assert [one.efficiency for one in points(ranks, "strong")] == pytest.approx([1, 1, 1])
    assert [one.speed_up for one in points(ranks, "strong")] == pytest.approx([1, 2, 4])


def test_faster_work_of_more_ranks_is_a_gain_and_the_sum_stays() -> None:
    point = points([World(1, StepTime(0.1)), World(2, StepTime(0.04))], "strong")[1]
    assert point.efficiency > 1
    assert point.lost["serial"] < 0
    assert sum(point.lost.values()) == pytest.approx(1 - point.efficiency)


def test_ranks_that_wait_for_cores_do_not_blame_the_link() -> None:
    """4 ranks on 2 cores compute twice as long, and send and come late because of that."""
    crowded = World(
        4, StepTime(0.20, 0.06, skew_s=0.03), starved_s=0.1, cores=2, calls=planted(4, "weak").calls
    )
    two = planted(2, "weak")
    point = points([planted(1, "weak"), two, crowded], "weak")[2]
    assert point.lost["communication"] * point.step_s == pytest.approx(two.time.exposed_s * 1.5)
    assert point.lost["cores"] == max(point.lost.values())
    assert sum(point.lost.values()) == pytest.approx(1 - point.efficiency)


def test_ranks_that_sleep_beside_few_cores_are_not_crowded() -> None:
    assert not World(8, StepTime(0.1), starved_s=0.005, cores=2).is_crowded
    assert World(8, StepTime(0.1), starved_s=0.02, cores=2).is_crowded
    assert not World(2, StepTime(0.1), starved_s=0.02, cores=2).is_crowded


def test_samples_tell_strong_from_weak() -> None:
    step = StepTime(0.1)
    assert kind_of([World(1, step, samples=32), World(4, step, samples=32)]) == "strong"
    assert kind_of([World(1, step, samples=32), World(4, step, samples=128)]) == "weak"
    assert kind_of([World(1, step), World(4, step)]) is None


def test_amdahls_serial_part_is_found() -> None:
    assert fixed_work_s([World(n, StepTime(0.09 / n + 0.01)) for n in (1, 2)]) == pytest.approx(
        0.01
    )


def test_collectives_of_all_ranks_grow_and_those_of_a_group_stay() -> None:
    calls = (
        Call("all_reduce", 800, 2, 1),
        Call("all_gather", 800, 2, 3),
        Call("all_reduce", 8, 1, 1),
    )
    reduced, gathered, alone = on_ranks(calls, 2, 8)
    assert (reduced.ranks, reduced.nbytes) == (8, 800)
    assert (gathered.ranks, gathered.nbytes) == (8, 200)
    assert (alone.ranks, alone.nbytes) == (1, 8)
    assert traffic([reduced], "gloo").nbytes == pytest.approx(2 * 7 / 8 * 800)


def test_the_last_of_more_ranks_comes_later() -> None:
    """The mean largest of 2, 4 and 8 normal values is 0.564, 1.029 and 1.424 (Tippett, 1925)."""
    assert [late_s(n) for n in (1, 2, 4, 8)] == pytest.approx([0, 0.564, 1.029, 1.424], rel=0.05)


def test_steps_without_time_are_refused() -> None:
    with pytest.raises(UsageError, match="steps that took time"):
        points([World(1, StepTime(0.0))], "weak")


def test_the_serial_part_is_at_most_the_work_of_fewest_ranks() -> None:
    assert fixed_work_s([World(1, StepTime(0.1)), World(2, StepTime(0.12))]) == pytest.approx(0.1)


def test_work_that_grows_with_more_ranks_is_not_serial() -> None:
    """All of a step of 100 ms is serial at most; 20 ms more on 2 ranks are something else's."""
    point = points([World(1, StepTime(0.1)), World(2, StepTime(0.12))], "strong")[1]
    assert point.lost["serial"] * point.step_s == pytest.approx(0.05)
    assert point.lost["cores"] * point.step_s == pytest.approx(0.02)
    assert sum(point.lost.values()) == pytest.approx(1 - point.efficiency)


def test_ranks_whose_work_grows_forecast_nothing() -> None:
    ranks = [World(1, StepTime(0.1)), World(2, StepTime(0.12))]
    with pytest.raises(UsageError, match="the ranks disturb each other") as raised:
        fit(ranks, "strong")
    assert "100 ms a step on 1, and 120 ms on 2" in str(raised.value)
    assert fit([ranks[0], World(2, StepTime(0.101))], "strong").fixed_s == pytest.approx(0.1)
    assert fit(ranks, "weak").fixed_s == pytest.approx(0.11)
