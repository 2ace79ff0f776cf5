"""What one optimizer's step tells the rules; on one process, without a group."""

import math

import pytest
import torch

from nbdist.engine.checks.use import Use
from nbdist.engine.component import EndedCell
from nbdist.engine.steps import guard
from nbdist.shared.wire import CellStart


def made(*, fused: bool = False) -> tuple[torch.nn.Parameter, torch.optim.Optimizer, Use]:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], fused=fused)
    return weight, optimizer, Use(optimizer)


def observed(use: Use, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    use.look(is_on=True)
    optimizer.step()
    told = use.at_step_end({})
    use.end()
    return told


def test_an_optimizer_whose_parameters_never_get_a_gradient_has_trained_nothing() -> None:
    _, optimizer, use = made()
    told = observed(use, optimizer)
    assert (told["parameters"], told["gradients"], told["trained"]) == (1, 0, False)


@pytest.mark.parametrize("fused", [False, True])
def test_one_that_had_a_gradient_in_a_step_that_nobody_observed_has_trained(fused: bool) -> None:
    weight, optimizer, use = made(fused=fused)
    weight.grad = torch.ones(3)
    optimizer.step()
    weight.grad = None
    told = observed(use, optimizer)
    assert (told["gradients"], told["trained"]) == (0, True)


def test_frozen_parameters_are_none_that_it_could_train() -> None:
    weight, optimizer, use = made()
    weight.requires_grad_(False)
    assert observed(use, optimizer)["parameters"] == 0


def test_nothing_is_told_of_the_gradients_of_a_step_that_is_left_out() -> None:
    weight, optimizer, use = made()
    guard.here.cell_began(CellStart(1, (0,), 1, guard=True))
    weight.grad = torch.full((3,), math.nan)
    left_out = observed(use, optimizer)
    weight.grad = torch.ones(3)
    made_again = observed(use, optimizer)
    list(guard.here.cell_ended(EndedCell(1, "", has_succeeded=True)))
    assert "gradients" not in left_out
    assert made_again["gradients"] == 1
