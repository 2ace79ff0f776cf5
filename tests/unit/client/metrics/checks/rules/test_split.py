"""Splits that differ are told of ranks that train one model, and of no others."""

from nbdist.client.metrics.checks.rules.split import UNSEEDED_SPLIT
from nbdist.client.metrics.checks.uses import Seen, Step


def said(*ranks: dict[str, float], reports: int = 3) -> str:
    values = dict(enumerate(ranks))
    return UNSEEDED_SPLIT.decide(Seen([Step(number, values) for number in range(1, reports + 1)]))


def test_splits_that_differ_are_told_once_it_lasts() -> None:
    apart = [{"split": 1.0, "parts": 2.0}, {"split": 2.0, "parts": 2.0}]
    assert "its indices differ, as in step 3" in said(*apart)
    assert said(*apart, reports=2) == ""
    assert said(apart[0], apart[0]) == ""


def test_folds_of_groups_that_train_models_of_their_own_may_differ() -> None:
    folds = [{"split": fold, "parts": 2.0, "shared_by": fold} for fold in (0.0, 0.0, 2.0, 2.0)]
    assert said(*folds) == ""
    folds[1]["split"] = 7.0
    assert "Draw the split from one seed" in said(*folds)


def test_ranks_that_train_alone_may_read_what_they_like() -> None:
    assert said({"split": 1.0}, {"split": 2.0}) == ""


def test_a_rank_that_reads_no_subset_is_not_compared() -> None:
    assert said({"split": 1.0, "parts": 2.0}, {"parts": 2.0}) == ""
