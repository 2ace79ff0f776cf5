"""What is said of losses that are no numbers."""

import math

from nbdist.shared.wire import Record
from tests.unit.client.metrics.checks.watching import checks_of as checks

NAN, INF = math.nan, math.inf


def steps(rank: int, first: int, *losses: float | None) -> list[Record]:
    return [
        Record(rank, step, "step", step, 0, {} if loss is None else {"loss": loss})
        for step, loss in enumerate(losses, first)
    ]


def test_a_loss_that_becomes_nan_on_one_rank_is_said_once_with_rank_and_step() -> None:
    cell = checks(2)
    cell.receive(steps(1, 41, 2.0, NAN, NAN))
    assert cell.lines() == []  # rank 0 has not told of that step
    cell.receive(steps(0, 41, 2.0, 1.9, 1.8))
    assert cell.lines() == ["The loss is NaN on rank 1 since step 42."]
    for step in range(44, 60):
        cell.receive(steps(0, step, NAN))
        cell.receive(steps(1, step, NAN))
    assert cell.lines(is_last=True) == []
    assert cell.found == ("The loss is NaN on rank 1 since step 42.",)


def test_all_ranks_are_named_in_one_sentence_although_one_tells_first() -> None:
    cell = checks(2)
    cell.receive(steps(0, 1, 2.0, NAN, NAN, NAN))
    cell.receive(steps(1, 1, 2.0, NAN, NAN))
    assert cell.lines() == ["The loss is NaN on all ranks since step 2."]


def test_a_loss_that_is_nan_for_one_step_is_not_said() -> None:
    cell = checks(1)
    cell.receive(steps(0, 1, 2.0, NAN, 1.9, NAN, 1.8))
    assert cell.lines(is_last=True) == []


def test_a_last_loss_that_is_infinite_is_said_at_the_end() -> None:
    cell = checks(1)
    cell.receive(steps(0, 1, 2.0, INF))
    assert cell.lines() == []
    assert cell.lines(is_last=True) == ["The loss is infinite on rank 0 since step 2."]


def test_ranks_of_a_pipeline_that_have_no_loss_are_heard_by_their_steps() -> None:
    cell = checks(2)
    cell.receive(steps(0, 1, None, None, None))
    cell.receive(steps(1, 1, 2.0, NAN, NAN))
    assert cell.lines() == ["The loss is NaN on rank 1 since step 2."]


def test_those_where_it_began_are_named_first_and_then_those_that_it_reached() -> None:
    cell = checks(2)
    cell.receive(steps(0, 1, 2.0, 2.0, NAN))
    cell.receive(steps(1, 1, 2.0, NAN, NAN))
    assert cell.lines() == ["The loss is NaN on rank 1 since step 2, and on rank 0 since step 3."]


def test_ranks_whose_steps_come_one_rank_after_the_other_are_named_together() -> None:
    cell = checks(2)
    cell.receive(steps(0, 1, INF, INF, 2.0, 2.0))
    cell.receive(steps(1, 1, INF, INF, 2.0, 2.0))
    assert cell.lines(is_last=True) == ["The loss was infinite on all ranks at step 1."]


def test_what_is_found_does_not_depend_on_which_rank_tells_first() -> None:
    losses = {0: (2.0, 2.0, NAN, NAN, 1.0, 1.0), 1: (2.0, NAN, NAN, NAN, NAN, 1.0)}
    for first, second in ((0, 1), (1, 0)):
        cell = checks(2)
        cell.receive(steps(first, 1, *losses[first]))
        assert cell.lines() == []
        cell.receive(steps(second, 1, *losses[second]))
        assert cell.lines() == [
            "The loss was NaN on rank 1 at step 2, and on rank 0 at step 3.",
        ]


def test_single_steps_of_different_ranks_are_no_loss_that_stays_none() -> None:
    cell = checks(2)
    cell.receive(steps(0, 1, 2.0, NAN, 2.0, 2.0, 2.0))
    cell.receive(steps(1, 1, 2.0, 2.0, 2.0, NAN, 2.0))
    assert cell.lines(is_last=True) == []


def test_a_rank_that_tells_nothing_is_not_waited_for_at_the_end() -> None:
    cell = checks(2)
    cell.receive(steps(1, 1, 2.0, NAN, NAN, NAN))
    assert cell.lines() == []
    assert cell.lines(is_last=True) == ["The loss is NaN on rank 1 since step 2."]
