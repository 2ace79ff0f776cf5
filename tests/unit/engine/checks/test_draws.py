"""Random numbers that a dataset draws in the rank."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from nbdist.engine.checks.draws import Draws


class Drawing(Dataset[Any]):
    """Draws by a function."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        return float(self.draw())


DRAW = {
    "torch": lambda: torch.rand(()),
    "python": random.random,
    "numpy": np.random.rand,
    "": lambda: 1.0,
}


def told(draw: Any, batches: int = 2) -> dict[str, float]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    draws, iterator = Draws(), iter(DataLoader(Drawing(draw)))
    for _ in range(batches):
        draws.fetch_begins()
        next(iterator)
        draws.fetch_ended(iterator)
    return draws.take()


@pytest.mark.parametrize("name", DRAW)
def test_the_generator_that_is_drawn_from_is_told_with_its_state(name: str) -> None:
    found = told(DRAW[name])
    assert list(found) == ([f"drawn_{name}"] if name else [])
    assert found == told(DRAW[name])


def test_of_a_first_batch_and_without_gradients_nothing_is_told() -> None:
    assert told(DRAW["torch"], batches=1) == {}
    with torch.no_grad():
        assert told(DRAW["torch"]) == {}


def test_other_states_are_other_numbers() -> None:
    first = told(DRAW["torch"], batches=2)
    draws, iterator = Draws(), iter(DataLoader(Drawing(DRAW["torch"])))
    for _ in range(2):
        draws.fetch_begins()
        next(iterator)
        draws.fetch_ended(iterator)
    assert draws.take() != first
