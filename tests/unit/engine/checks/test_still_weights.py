"""What a rank counts of weights that have not moved."""

import pytest
import torch

from nbdist.engine.checks.still_weights import StillWeights

ONES = {"sampled": 64.0, "rate": 1e-4, "peak": 1e-4}


def adam(weights: torch.Tensor, kind: type[torch.optim.Optimizer] = torch.optim.AdamW):  # type: ignore[no-untyped-def]
    weights.requires_grad_().grad = torch.ones_like(weights)
    return kind([weights], lr=1e-4, weight_decay=0.0)  # type: ignore[call-arg]


def after_a_step(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    still = StillWeights(optimizer)
    assert still.report(optimizer, ()) == {}
    optimizer.step()
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return still.report(optimizer, grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_update_below_the_rounding_of_a_weight_leaves_it_still(dtype: torch.dtype) -> None:
    assert after_a_step(adam(torch.ones(64, dtype=dtype))) == ONES | {"still": 64.0}


def test_a_weight_that_moves_is_not_still() -> None:
    moving = adam(torch.full((64,), 1e-3, dtype=torch.bfloat16))
    assert after_a_step(moving) == ONES | {"still": 0.0}


def test_an_element_without_a_gradient_is_not_sampled() -> None:
    optimizer = adam(torch.ones(64, dtype=torch.bfloat16))
    (weights,) = optimizer.param_groups[0]["params"]
    weights.grad[16:] = 0
    assert after_a_step(optimizer)["sampled"] == 16.0


def test_of_full_precision_and_of_frozen_weights_nothing_is_reported() -> None:
    assert after_a_step(adam(torch.ones(64))) == {}
    frozen = torch.ones(64, dtype=torch.bfloat16)
    optimizer = adam(frozen)
    frozen.requires_grad_(False)
    assert after_a_step(optimizer) == {}


def test_an_optimizer_that_may_keep_weights_of_its_own_is_not_judged() -> None:
    class Own(torch.optim.AdamW):
        """Of a library."""

    assert after_a_step(adam(torch.ones(64, dtype=torch.bfloat16), Own)) == {}


def test_a_rate_on_its_way_to_the_peak_of_its_schedule_is_told_with_it() -> None:
    optimizer = adam(torch.ones(64, dtype=torch.bfloat16))
    torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=9)
    told = after_a_step(optimizer)
    assert (told["rate"], told["peak"]) == pytest.approx((1e-5, 1e-4))
