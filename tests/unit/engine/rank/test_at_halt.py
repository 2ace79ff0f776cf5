"""What ranks do while they stand still: the texts of values, and rates beside schedulers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from nbdist.engine.compat import torch_live
from nbdist.engine.rank.at_halt import MOST_CHARACTERS, peek, set_rate, text_of

Optimizer = torch.optim.Optimizer


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> torch_live.LiveObjects:
    known = torch_live.LiveObjects()
    monkeypatch.setattr(torch_live, "here", known)
    return known


def optimizer_of(*rates: float) -> Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups)


def stepped(make: Callable[[Optimizer], Any]) -> tuple[Any, Optimizer]:
    """Return a scheduler that has made three steps from 0.1, and its optimizer."""
    optimizer = optimizer_of(0.1)
    scheduler = make(optimizer)
    for _ in range(3):
        step_both(optimizer, scheduler)
    return scheduler, optimizer


def step_both(optimizer: Optimizer, scheduler: Any) -> float:
    optimizer.step()
    is_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    scheduler.step(*([1.0] if is_plateau else []))
    rate: float = optimizer.param_groups[0]["lr"]
    return rate


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10),
        lambda o: lr_scheduler.StepLR(o, 5, 0.5),
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 100),
        lambda o: lr_scheduler.LinearLR(o, 0.5, 1.0, 10),
    ],
)
def test_a_schedule_goes_on_from_a_rate_that_was_set(
    live: torch_live.LiveObjects, make: Callable[[Optimizer], Any]
) -> None:
    untouched, its_optimizer = stepped(make)
    scheduler, optimizer = stepped(make)
    live.remember(lr_scheduler.LRScheduler, scheduler)
    factor = 0.5 / its_optimizer.param_groups[0]["lr"]
    assert set_rate([optimizer], 0.5) == []
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 0.5
    for _ in range(4):
        expected = factor * step_both(its_optimizer, untouched)
        assert step_both(optimizer, scheduler) == pytest.approx(expected)


def test_a_plateau_reduces_the_rate_that_was_set(live: torch_live.LiveObjects) -> None:
    scheduler, optimizer = stepped(lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0))
    live.remember(lr_scheduler.LRScheduler, scheduler)
    assert set_rate([optimizer], 0.5) == []
    assert step_both(optimizer, scheduler) == pytest.approx(0.05)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
        lambda o: lr_scheduler.LambdaLR(o, lambda epoch: max(0, epoch - 10) / 10),
    ],
)
def test_a_scheduler_that_cannot_go_on_from_a_rate_is_named(
    live: torch_live.LiveObjects, make: Callable[[Optimizer], Any]
) -> None:
    untouched, its_optimizer = stepped(make)
    scheduler, optimizer = stepped(make)
    live.remember(lr_scheduler.LRScheduler, scheduler)
    assert set_rate([optimizer], 0.5) == [type(scheduler).__name__]
    assert step_both(optimizer, scheduler) == step_both(its_optimizer, untouched)


def test_all_groups_of_all_optimizers_get_the_rate_and_a_tensor_stays_the_same_one(
    live: torch_live.LiveObjects,
) -> None:
    first, second = optimizer_of(0.1, 0.2), optimizer_of(0.3)
    rate = torch.tensor(0.3)
    second.param_groups[0]["lr"] = rate
    assert set_rate([first, second], 0.05) == []
    assert [group["lr"] for group in first.param_groups] == [0.05, 0.05]
    assert second.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.05)


def test_a_scheduler_of_another_optimizer_is_not_named(live: torch_live.LiveObjects) -> None:
    other = lr_scheduler.LambdaLR(optimizer_of(0.1), lambda epoch: 1.0)
    live.remember(lr_scheduler.LRScheduler, other)
    assert set_rate([optimizer_of(0.1)], 0.5) == []


def test_values_are_short_texts_and_a_tensor_of_one_element_is_its_number() -> None:
    assert text_of(torch.tensor([[2.5]])) == "2.5"
    assert text_of("x" * 9000) == "'" + "x" * (MOST_CHARACTERS - 1) + "…"


def test_a_peek_has_no_gradients_and_leaves_random_numbers_as_they_were() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    torch.manual_seed(1)
    expected = torch.rand(3).tolist()
    torch.manual_seed(1)
    names = {"weight": weight, "torch": torch}
    assert peek("(weight.sum() + torch.rand(1)).requires_grad", names) == {"text": "False"}
    assert torch.rand(3).tolist() == expected
