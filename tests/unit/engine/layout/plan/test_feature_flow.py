"""Features are followed while operations treat each alone, and what mixes them is named."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbdist.engine.layout.plan import trace

# Each as (batch, tokens, features) in and out, to which the second layer belongs.
ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda x: x.clone().relu_().mul_(2),
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "moved": lambda x: x.transpose(1, 2).contiguous().permute(0, 2, 1),
    "folded": lambda x: x.flatten(0, 1).view(x.shape),
    "its own product": lambda x: x * x.sigmoid(),
    "tokens mixed": lambda x: torch.ones(x.shape[1], x.shape[1]) @ x,
    "mean of tokens": lambda x: x.mean(1, keepdim=True).expand(-1, 3, -1),
    "one token": lambda x: x[:, 0] + x.softmax(1)[:, 1],
    "gated by tokens": lambda x: torch.where(torch.ones(1, 3, 1) > 0, x, 0),
}
MIXED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "softmax": (lambda x: x.softmax(-1), "goes through _softmax"),
    "a norm": (lambda x: F.layer_norm(x, (8,)), "goes through native_layer_norm"),
    "a mean of all": (lambda x: x / x.mean(), "goes through mean"),
    "a sum over features": (lambda x: x - x.sum(-1, keepdim=True), "goes through sum"),
    "numbers for each feature": (lambda x: x * torch.arange(8.0), "goes through mul"),
    "into another tensor": (lambda x: torch.zeros(2, 3, 8).copy_(x), "goes through copy_"),
    "turned": (lambda x: x.flip(-1), "goes through flip"),
    "other features": (lambda x: x + x.transpose(1, 2).reshape(2, 3, 8), "goes through"),
}


class Chain(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor], *, returns: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.between, self.returns = between, returns

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        made = self.up(x)
        out = self.down(self.between(made))
        return {"out": out, "made": made} if self.returns else out


def _call(model: nn.Module) -> trace.ModuleCall:
    _, calls = trace.find_inputs(model, torch.ones(2, 3, 4))
    return next(call for call in calls if call.name == "up")


@pytest.mark.parametrize("between", ALONE.values(), ids=ALONE)
def test_a_feature_is_followed_where_it_is_treated_alone(
    between: Callable[[Tensor], Tensor],
) -> None:
    assert (_call(Chain(between)).feeds, _call(Chain(between)).mixed) == ("down", "")


@pytest.mark.parametrize(("between", "words"), MIXED.values(), ids=MIXED)
def test_what_mixes_features_is_named(between: Callable[[Tensor], Tensor], words: str) -> None:
    call = _call(Chain(between))
    assert call.feeds == ""
    assert words in call.mixed


def test_what_a_model_returns_is_needed_whole() -> None:
    assert _call(Chain(F.relu, returns=True)).feeds == ""


def test_what_two_layers_take_has_no_row() -> None:
    class Both(Chain):
        def forward(self, x: Tensor) -> Tensor:
            made = self.up(x)
            other = self.get_submodule("other")
            return self.down(made) + other(made)

    model = Both(F.relu)
    model.add_module("other", nn.Linear(8, 4))
    assert _call(model).feeds == ""


def test_a_layer_whose_weight_is_computed_is_not_cut() -> None:
    model = Chain(F.relu)
    model.down = nn.utils.parametrizations.weight_norm(model.down)
    assert _call(model).feeds == ""


def test_one_number_for_all_features_is_not_followed_as_they_are() -> None:
    class Gated(Chain):
        def forward(self, x: Tensor) -> Tensor:
            gate = self.get_submodule("gate")
            return self.down(gate(x).sigmoid() * self.up(x))

    model = Gated(F.relu)
    model.add_module("gate", nn.Linear(4, 1))
    assert _call(model).feeds == ""
