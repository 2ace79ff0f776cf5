"""When an iteration ends, and how often saving costs least."""

import pytest
import torch
from torch import nn

from nbdist.engine.checkpoint.automatic import Rhythm, advice, best_interval, failure_s


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def test_with_one_optimizer_every_step_from_the_second_on_ends_an_iteration() -> None:
    rhythm, one = Rhythm(), optimizer()
    assert [rhythm.closes(one) for _ in range(4)] == [False, True, True, True]


def test_with_several_the_last_before_one_steps_again_ends_it() -> None:
    rhythm, critic, actor = Rhythm(), optimizer(), optimizer()
    steps = [critic, actor, critic, actor, critic, actor]
    closed = [rhythm.closes(one) for one in steps]
    assert closed == [False, False, False, True, False, True]


def test_an_optimizer_that_is_gone_closes_nothing() -> None:
    rhythm, one = Rhythm(), optimizer()
    assert not rhythm.closes(one)
    del one
    assert not rhythm.closes(optimizer())


@pytest.mark.parametrize("keeps_the_first", [True, False])
def test_each_loop_of_a_cell_ends_its_own_iterations(keeps_the_first: bool) -> None:
    rhythm, first = Rhythm(), optimizer()
    assert [rhythm.closes(first) for _ in range(3)] == [False, True, True]
    if not keeps_the_first:
        del first
    second, third = optimizer(), optimizer()
    assert [rhythm.closes(second) for _ in range(4)] == [False, False, True, True]
    assert [rhythm.closes(one) for one in [second, third] * 3] == [True, False] * 3
    assert [rhythm.closes(third) for _ in range(3)] == [False, True, True]


def test_a_step_that_is_left_out_once_changes_nothing_from_the_next_iteration_on() -> None:
    rhythm, critic, actor = Rhythm(), optimizer(), optimizer()
    for one in [critic, actor] * 2:
        rhythm.closes(one)
    overflowed = [critic, critic, actor]
    assert [rhythm.closes(one) for one in overflowed] == [False, False, False]
    assert [rhythm.closes(one) for one in [critic, actor] * 2] == [False, True, False, True]


@pytest.mark.parametrize(
    ("cost_s", "step_s", "steps"), [(0.5, 0.1, 2939), (50.0, 1.0, 2939), (0.0, 1.0, 1)]
)
def test_the_interval_is_the_root_of_twice_the_cost_times_the_time_between_faults(
    cost_s: float, step_s: float, steps: int
) -> None:
    assert best_interval(cost_s, step_s) == steps


def test_more_faults_ask_for_more_checkpoints() -> None:
    assert best_interval(1.0, 0.1, failure_s=3600.0) < best_interval(1.0, 0.1)
    assert best_interval(1.0, 0.0) >= 1


def test_the_time_between_faults_is_what_was_seen_and_a_day_before_anything_was() -> None:
    assert failure_s(0, 0.0) == 86400.0
    assert failure_s(0, 9 * 86400.0) == 10 * 86400.0
    assert failure_s(9, 86400.0) == pytest.approx(0.2 * 86400.0)


def test_the_advice_names_the_faults_that_it_follows_from() -> None:
    assert advice(100, 0.5, 0.1, 0, 60.0) == (
        "At one fault a day, a checkpoint every 2,940 steps costs least (a step takes 0.100 s, a "
        "checkpoint 0.500 s of training)."
    )
    assert advice(100, 0.5, 0.1, 3, 7200.0).startswith(
        "At a fault every 6.50 h (this session has seen 3 in 2.00 h; one a day was assumed before)"
        ", a checkpoint every 1,530 steps costs least"
    )
    assert advice(2000, 0.5, 0.1, 0, 60.0) == ""
