"""One model in two modes is said, with the ranks; what is meant, or another's, is not."""

from nbdist.client.metrics.checks.rules.modes import ONE_RANK_IN_EVAL
from nbdist.client.metrics.checks.uses import Seen, Step


def said(
    *steps: tuple[float, ...], names: tuple[float, ...] = (7.0, 7.0), is_spread: bool = True
) -> str:
    """Return what is said of steps: how many of three modules evaluate on each rank."""
    place = {"part": 0.0, "parts": 2.0} if is_spread else {}
    told = [
        {
            rank: {"modal": 3.0, "in_eval": count, "modal_names": names[rank % 2]} | place
            for rank, count in enumerate(of_step)
        }
        for of_step in steps
    ]
    return ONE_RANK_IN_EVAL.decide(Seen([Step(n, by_rank) for n, by_rank in enumerate(told, 1)]))


def test_the_ranks_in_evaluation_mode_are_named_with_the_step() -> None:
    assert "ranks 0, 2 had 3 of 3 in evaluation mode at step 2, and rank 1 none." in said(
        (3, 0, 3), (3, 0, 3)
    )


def test_a_part_of_the_model_counts_too() -> None:
    assert "rank 1 had 2 of 3 in evaluation mode at step 2, and rank 0 1 of them." in said(
        (1, 2), (1, 2)
    )


def test_what_all_ranks_evaluate_is_meant() -> None:
    assert said((2, 2), (2, 2)) == ""


def test_one_step_alone_says_nothing() -> None:
    assert said((0, 3)) == ""
    assert said((0, 3), (0, 0)) == ""


def test_a_stage_with_other_modules_and_a_model_of_a_ranks_own_are_not_compared() -> None:
    assert said((0, 3), (0, 3), names=(7.0, 8.0)) == ""
    assert said((0, 3), (0, 3), is_spread=False) == ""
