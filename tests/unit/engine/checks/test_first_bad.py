"""Which module of a forward is the first whose output is not finite, and for which samples."""

import math

import torch
from torch import nn

from nbdist.engine.checks.first_bad import Looking, bad_rows, looking


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()


class Whole(nn.Module):
    """Takes a logarithm itself, between its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x).log()
        return out


def seen_in(model: nn.Module, x: torch.Tensor) -> Looking:
    with looking(model, len(x)) as seen:
        model(x)
    assert all(not module._forward_hooks for module in model.modules())
    return seen


def test_of_finite_outputs_nothing_is_said() -> None:
    seen = seen_in(nn.Sequential(nn.Identity(), Log()), torch.ones(3, 2))
    assert (seen.first, seen.rows) == (None, None)


def test_the_first_module_is_named_and_the_sample_for_which_it_is() -> None:
    x = torch.ones(4, 2)
    x[2, 1] = -1
    seen = seen_in(nn.Sequential(nn.Identity(), nn.Sequential(Log(), nn.Linear(2, 2))), x)
    assert seen.first is not None
    assert (seen.first.module, seen.first.kind) == ("1.0", "Log")
    assert (seen.first.is_passed_on, seen.first.weights) == (False, ())
    assert seen.rows == [2]


def test_a_module_that_got_what_is_not_finite_has_passed_it_on() -> None:
    seen = seen_in(nn.Sequential(nn.ReLU()), torch.tensor([[1.0], [math.nan]]))
    assert seen.first is not None
    assert seen.first.is_passed_on


def test_weights_that_are_not_finite_are_named() -> None:
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight[0, 0] = math.inf
    seen = seen_in(nn.Sequential(layer), torch.ones(3, 2))
    assert seen.first is not None
    assert seen.first.weights == ("weight",)
    assert seen.rows == [0, 1, 2]


def test_what_a_module_computes_between_its_parts_is_its_own() -> None:
    seen = seen_in(Whole(), -torch.ones(1, 2))
    assert seen.first is not None
    assert (seen.first.module, seen.first.kind) == ("", "Whole")


def test_rows_are_known_of_outputs_that_have_one_for_each_sample() -> None:
    bad = torch.tensor([[math.nan, 1.0], [1.0, 1.0]])
    assert bad_rows([bad], 2) == [0]
    assert bad_rows([bad, bad.flip(0)], 2) == [0, 1]
    assert bad_rows([bad], 4) is None
    assert bad_rows([bad], 0) is None
    assert bad_rows([torch.tensor(math.nan)], 2) is None


def test_rows_come_from_the_first_output_that_has_them() -> None:
    x = torch.ones(4, 2)
    x[3] = -1
    seen = seen_in(nn.Sequential(nn.Flatten(0), Log(), nn.Unflatten(0, (4, 2))), x)
    assert seen.first is not None
    assert (seen.first.module, seen.rows) == ("1", [3])
