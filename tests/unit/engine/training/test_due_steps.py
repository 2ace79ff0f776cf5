"""A callback that is called at some steps of a cell, and costs the others nothing."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from nbdist.engine.kernel.records import Recorder
from nbdist.engine.training.hooks import Hooks


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hooks]:
    monkeypatch.setattr(Hooks, "_open_machine", lambda _: None)
    recorder = Recorder(0, lambda _: None)
    hooks = Hooks(recorder)
    hooks.set_enabled(True)
    yield hooks
    hooks.set_enabled(False)
    recorder.close()


def optimizer() -> Any:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    return torch.optim.SGD([weight], lr=0.1)


def called(hooks: Hooks, next_due: int = 10**9) -> list[int]:
    """Return the list that gets each step at which it is called."""
    steps: list[int] = []

    def due(step: int) -> int:
        steps.append(step)
        return max(next_due, step + 1)

    hooks.on_due = due
    return steps


def test_it_is_called_at_the_first_step_and_at_those_that_it_asks_for(hooks: Hooks) -> None:
    steps, one = called(hooks, next_due=4), optimizer()
    for _ in range(6):
        one.step()
    assert steps == [1, 4, 5, 6]
    hooks.begin_cell()
    one.step()
    assert steps[4:] == [1]


def test_an_optimizers_first_step_and_a_passs_first_step_are_due(hooks: Hooks) -> None:
    steps, one = called(hooks), optimizer()
    for _ in range(3):
        one.step()
    optimizer().step()
    one.step()
    assert steps == [1, 4]
    for _ in DataLoader([1.0, 2.0]):  # type: ignore[arg-type]
        one.step()
    assert steps == [1, 4, 5]


def test_one_that_fails_is_not_called_again_in_its_cell(hooks: Hooks) -> None:
    steps: list[int] = []

    def due(step: int) -> int:
        steps.append(step)
        raise RuntimeError("planted")

    hooks.on_due, one = due, optimizer()
    for _ in range(3):
        one.step()
        optimizer().step()
    assert len(steps) == 1
    assert any("planted" in notice for notice in hooks.notices())
