"""Gradients that are not zeroed are said once that is the rule, of an optimizer that is alone."""

from nbdist.client.metrics.checks.rules.zeroing import FORGOTTEN_ZERO_GRAD
from nbdist.client.metrics.checks.uses import Seen, Step


def said(*kept: tuple[float, ...], optimizers: float = 1.0) -> str:
    """Return what is said of steps: whether each rank's held old gradients."""
    told = [
        {r: {"unzeroed": one, "optimizers": optimizers} for r, one in enumerate(of_step)}
        for of_step in kept
    ]
    steps = [Step(number, by_rank) for number, by_rank in enumerate(told, 1)]
    return FORGOTTEN_ZERO_GRAD.decide(Seen(steps))


def test_two_steps_after_each_other_are_named_with_the_ranks() -> None:
    assert "were not zeroed before step 2 and step 3 on ranks 0-1" in said((0, 0), (1, 1), (1, 1))
    assert "on rank 1, and" in said((0, 1), (0, 1))


def test_one_step_or_one_before_it_became_right_is_not_told() -> None:
    assert said((1, 1)) == ""
    assert said((1, 1), (0, 0)) == ""


def test_optimizers_that_step_at_other_times_are_not_judged() -> None:
    assert said((1, 1), (1, 1), optimizers=2.0) == ""
