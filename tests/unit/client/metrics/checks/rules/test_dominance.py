"""A loss a hundred times the others' is said of many steps in a row, and of nothing less."""

import math
from collections.abc import Sequence

import pytest

from nbdist.client.metrics.checks.rules.dominance import IN_A_ROW, ONE_RANK_DOMINATES
from nbdist.shared.wire import Record
from tests.unit.client.metrics.checks.watching import Watching

APART = [{"parts": 2.0, "part": float(rank)} for rank in range(2)]
LARGE = [1.0, 500.0]


def said(
    *steps: Sequence[float | None], places: list[dict[str, float]] = APART, first: int = 1
) -> str:
    """Return what is said first of steps: the losses of the ranks in each."""
    watching = Watching(ONE_RANK_DOMINATES, range(len(places)))
    for rank, place in enumerate(places):
        watching.take(Record(rank, 1, "use", 1, 0, place))
    heard = [
        watching.take(Record(rank, n, "step", n, 0, {} if loss is None else {"loss": loss}))
        for n, losses in enumerate(steps, first)
        for rank, loss in enumerate(losses)
    ]
    return next((sentence for sentence in heard if sentence), watching.end())


def test_the_rank_is_named_with_both_losses_and_the_step() -> None:
    sentence = said(*[LARGE] * IN_A_ROW)
    assert sentence.startswith(
        "The loss of rank 1 is 500 at step 20, where the other has 1.00, and 100 times"
    )


def test_it_may_begin_in_the_midst_of_a_training() -> None:
    sentence = said(*[[2.0, 2.0]] * 30, *[LARGE] * IN_A_ROW)
    assert "at step 50" in sentence


def test_a_loss_that_is_negative_counts_by_its_size() -> None:
    assert said(*[[-1.0, -500.0]] * IN_A_ROW)


@pytest.mark.parametrize("between", [[2.0, 3.0], [2.0, None], [2.0, math.inf], [2.0, math.nan]])
def test_a_single_step_between_breaks_the_row(between: Sequence[float | None]) -> None:
    assert said(*[LARGE] * (IN_A_ROW - 1), between, *[LARGE] * (IN_A_ROW - 1)) == ""


def test_a_step_of_which_nothing_has_come_breaks_it_too() -> None:
    watching = Watching(ONE_RANK_DOMINATES, (0, 1))
    for rank, place in enumerate(APART):
        watching.take(Record(rank, 1, "use", 1, 0, place))
    for n in [*range(1, IN_A_ROW), *range(IN_A_ROW + 1, 2 * IN_A_ROW)]:
        for rank, loss in enumerate(LARGE):
            assert watching.take(Record(rank, n, "step", n, 0, {"loss": loss})) == ""


def test_ranks_may_be_heard_one_after_the_other_once_the_cell_is_over() -> None:
    watching = Watching(ONE_RANK_DOMINATES, (0, 1))
    for rank, loss in enumerate([500.0, 1.0]):
        watching.take(Record(rank, 1, "use", 1, 0, APART[rank]))
        for n in range(1, IN_A_ROW + 1):
            assert watching.take(Record(rank, n, "step", n, 0, {"loss": loss})) == ""
    assert watching.end().startswith("The loss of rank 0 is 500 at step 20")


def test_near_zero_a_ratio_says_nothing() -> None:
    assert said(*[[1e-6, 0.5]] * 100) == ""


def test_ranks_that_take_part_with_a_loss_of_0_are_not_compared() -> None:
    assert said(*[[0.0, 500.0]] * 100) == ""


def test_a_rank_whose_hard_samples_stay_as_they_were_is_not_said() -> None:
    # One sample of few is an outlier: all losses were that large when the training began.
    assert said(*[[40.0, 60.0]] * 5, *[[0.1, 50.0]] * 100) == ""


def test_with_more_ranks_the_median_of_the_others_counts() -> None:
    places = [{"parts": 4.0, "part": float(rank)} for rank in range(4)]
    sentence = said(*[[1.0, 2.0, 0.5, 500.0]] * IN_A_ROW, places=places)
    assert sentence.startswith("The loss of rank 3 is 500 at step 20, where others have 1.00")
    assert said(*[[1.0, 2.0, 0.5, 90.0]] * IN_A_ROW, places=places) == ""


def test_where_a_loss_is_no_number_that_is_said_by_another_rule() -> None:
    places = [{"parts": 3.0, "part": float(rank)} for rank in range(3)]
    assert said(*[[1.0, math.inf, 1.0]] * 100, places=places) == ""
    assert said(*[[1.0, math.nan, 1.0]] * 100, places=places) == ""


def test_ranks_of_one_part_are_named_together() -> None:
    places = [{"parts": 2.0, "part": float(rank // 2)} for rank in range(4)]
    sentence = said(*[[500.0, 500.0, 1.0, 1.0]] * IN_A_ROW, places=places)
    assert sentence.startswith("The loss of ranks 0-1 is 500")
    assert said(*[[500.0, None, 1.0, None]] * IN_A_ROW, places=places)  # of a pipeline


def test_ranks_that_train_models_of_their_own_are_not_compared() -> None:
    assert said(*[LARGE] * 100, places=[{}, {}]) == ""
    groups = [{"parts": 2.0, "part": rank % 2, "shared_by": 2.0 * (rank // 2)} for rank in range(4)]
    assert said(*[[1.0, 1.0, 500.0, 400.0]] * 100, places=groups) == ""
    sentence = said(*[[1.0, 1.0, 500.0, 1.0]] * IN_A_ROW, places=groups)
    assert sentence.startswith("The loss of rank 2 is 500")


def test_a_rank_that_trains_a_model_of_its_own_beside_is_not_judged() -> None:
    watching = Watching(ONE_RANK_DOMINATES, (0, 1))
    for rank, place in enumerate(APART):
        watching.take(Record(rank, 1, "use", 1, 0, place))
        watching.take(Record(rank, 2, "use", 1, 0, {"optimizer": 1.0}))
    for n in range(1, 100):
        for rank, loss in enumerate(LARGE):
            assert watching.take(Record(rank, n, "step", n, 0, {"loss": loss})) == ""
