"""The weight of a share: what it may be, and that one of 0 takes part without a number."""

import math
from typing import Any

import pytest
import torch

import nbdist
from nbdist.engine.layout.weight import loss_of, total_of, weigh_parts


def masked_mean(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(out, y, ignore_index=-100)


def test_a_weight_is_a_number_or_the_sum_of_a_tensor() -> None:
    assert total_of(3) == 3.0
    assert total_of(torch.tensor([[True, False], [True, True]])) == 3.0


@pytest.mark.parametrize(
    ("weight", "sentence"),
    [
        ("all", "got a str as weight.\nDo:  give a number, or a tensor that is summed"),
        (-1, "A weight is a number from 0 on, and this one is -1.0."),
        (math.nan, "A weight is a number from 0 on, and this one is nan."),
        (torch.tensor([math.inf]), "A weight is a number from 0 on, and this one is inf."),
    ],
)
def test_another_weight_is_refused(weight: Any, sentence: str) -> None:
    with pytest.raises(nbdist.LayoutError) as raised:
        total_of(weight)
    assert sentence in str(raised.value)


def test_a_share_that_keeps_nothing_has_the_loss_0_and_no_gradient() -> None:
    model, x, y = torch.nn.Linear(2, 3), torch.ones(4, 2), torch.full((4,), -100)
    assert masked_mean(model(x), y).isnan()
    loss = loss_of(model(x), y, masked_mean, 0.0)
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    with torch.no_grad():
        assert loss_of((model(x), y), y, masked_mean, 0.0).item() == 0.0


def test_micro_batches_count_by_what_they_keep() -> None:
    out, y = torch.randn(6, 3).double(), torch.tensor([0, -100, 1, 2, -100, -100])
    (targets, each), weighed = weigh_parts(y, masked_mean, y != -100, 6)
    parts = [slice(0, 2), slice(2, 4), slice(4, 6)]
    losses = [weighed(out[part], (targets[part], each[part])) for part in parts]
    torch.testing.assert_close(torch.stack(losses).mean(), masked_mean(out, y))


@pytest.mark.parametrize("weight", [3.0, torch.tensor(3.0), torch.ones(5)])
def test_micro_batches_need_the_weight_of_each_sample(weight: float | torch.Tensor) -> None:
    with pytest.raises(nbdist.LayoutError, match="needs the weight of each sample"):
        weigh_parts(torch.ones(6), masked_mean, weight, 6)
