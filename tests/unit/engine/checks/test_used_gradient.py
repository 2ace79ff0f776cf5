"""A used gradient that the next step's are added to is seen, in whatever way others are zeroed."""

from collections.abc import Callable

import torch

from nbdist.engine.checks.used_gradient import UsedGradient

Weights = torch.nn.Parameter


def is_kept(*between: Callable[[Weights], object], first: float = 1.0) -> bool:
    """Return whether a used gradient is in the next step.

    Args:
        between: What happens after the step, and after each backward but the last.
        first: What the used gradient is made of.
    """
    weights, used = torch.nn.Parameter(torch.ones(3)), UsedGradient()
    (weights * first).sum().backward()
    used.watch([torch.nn.Parameter(torch.ones(1)), weights])  # the other is not trained
    for act in between:
        act(weights)
        used.backward_begins()
        weights.sum().backward()
    return used.is_in_next


def nothing(_weights: Weights) -> None:
    """Forget it."""


def none(weights: Weights) -> None:
    weights.grad = None


def zero(weights: Weights) -> None:
    assert weights.grad is not None
    weights.grad.zero_()


def halve(weights: Weights) -> None:
    assert weights.grad is not None
    weights.grad.mul_(0.5)


def test_a_gradient_that_nothing_zeroes_is_in_the_next_step_of_however_many_backwards() -> None:
    assert is_kept(nothing)
    assert is_kept(nothing, nothing, nothing)


def test_one_that_is_zeroed_is_not_and_backwards_after_it_add_to_each_other() -> None:
    assert not is_kept(none)
    assert not is_kept(zero)
    assert not is_kept(none, nothing, nothing)
    assert not is_kept(zero, nothing)


def test_one_that_another_models_backward_has_come_through_may_be_zeroed_later() -> None:
    assert not is_kept(nothing, none)
    assert not is_kept(nothing, zero)


def test_one_that_the_loop_changes_is_kept_on_purpose_and_one_of_zeros_does_no_harm() -> None:
    assert not is_kept(halve)
    assert not is_kept(nothing, first=0.0)


def test_an_optimizer_without_gradients_has_none_to_keep() -> None:
    used = UsedGradient()
    used.watch([torch.nn.Parameter(torch.ones(1))])
    used.backward_begins()
    assert not used.is_in_next
