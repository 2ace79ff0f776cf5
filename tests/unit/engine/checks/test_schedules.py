"""What a rank counts of the schedules of a learning rate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, LinearLR

from nbdist.engine.checks import schedules
from nbdist.engine.checks.schedules import Schedules

Make = Callable[[torch.optim.Optimizer], list[Any]]


@pytest.fixture(autouse=True)
def one_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_has_one_backward", lambda: True)


def told(make: Make, *, turns: int = 1, to: int | None = None) -> dict[str, float]:
    """Return what is told of schedules, those in a list among them, that step with an optimizer."""
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    made = make(optimizer)
    known = [one for one in made if isinstance(one, lr_scheduler.LRScheduler)]
    for one in made:
        known += getattr(one, "_schedulers", [])
    seen = Schedules()
    seen.since(known, 0)
    for step in range(4):
        optimizer.step()
        for _ in range(turns):
            for one in made:
                one.step() if to is None else one.step(to + step)
    return seen.since(known, 4)


def test_steps_of_a_schedule_are_counted_for_each_step_of_the_optimizer() -> None:
    assert told(lambda o: [CosineAnnealingLR(o, 9)]) == {"turns": 1.0, "overwritten": 0.0}
    assert told(lambda o: [CosineAnnealingLR(o, 9)], turns=3) == {"turns": 3.0, "overwritten": 0.0}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_schedule_that_is_set_to_a_place_twice_does_not_run_faster() -> None:
    assert told(lambda o: [CosineAnnealingLR(o, 9)], turns=2, to=1) == {}


def test_two_of_which_one_computes_the_rate_from_the_initial_one_overwrite_each_other() -> None:
    both = told(lambda o: [ExponentialLR(o, 0.9), LambdaLR(o, lambda n: 1 / (n + 1))])
    assert both == {"turns": 1.0, "overwritten": 1.0}


CHAINS: dict[str, Make] = {
    "one after the other's step": lambda o: [LinearLR(o), ExponentialLR(o, 0.9)],
    "chained": lambda o: [lr_scheduler.ChainedScheduler([LinearLR(o), ExponentialLR(o, 0.9)])],
    "in sequence": lambda o: [
        lr_scheduler.SequentialLR(o, [LinearLR(o), LambdaLR(o, lambda n: 1.0)], [2])
    ],
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_sound(name: str) -> None:
    found = told(CHAINS[name])
    assert found["overwritten"] == 0.0
    assert found.get("turns", 1.0) <= 1.0


def test_a_schedule_within_another_one_answers_to_that() -> None:
    class Around(lr_scheduler.LRScheduler):
        """A warm-up around another schedule."""

        def __init__(self, inner: LambdaLR) -> None:
            self.inner = inner
            super().__init__(inner.optimizer)

        def get_lr(self) -> list[Any]:
            return [rate * min(1.0, self.last_epoch / 9) for rate in self.inner.get_last_lr()]

    inner = []

    def make(optimizer: torch.optim.Optimizer) -> list[Any]:
        inner.append(LambdaLR(optimizer, lambda n: 1 / (n + 1)))
        return [*inner, Around(inner[0])]

    assert told(make)["overwritten"] == 0.0


def test_of_accumulated_gradients_how_often_a_schedule_steps_is_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedules, "_has_one_backward", lambda: False)
    assert told(lambda o: [CosineAnnealingLR(o, 9)], turns=4) == {"overwritten": 0.0}
