"""The samples of a trial's models, alike on a rank and in the shadow. float64.

By index: each rank has six samples of its own for each step. By a loader: a data set, of which each
rank has a part of each global batch.
"""

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from tests.random.acts import GLOBAL_BATCH, STEPS_OF_EPOCH

IN, OUT = 4, 2


def batch(seed: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's samples for a step: (6, IN) and (6, OUT)."""
    return _samples(6, 1_000_003 * seed + 101 * step + rank)


def dataset(seed: int) -> TensorDataset:
    """Return the data set of a model's loader."""
    return TensorDataset(*_samples(STEPS_OF_EPOCH * GLOBAL_BATCH, 7 + seed))


def noise(seed: int, step: int, rank: int) -> int:
    """Return the seed of a step's dropout on a rank."""
    return 11 + 1_000_003 * seed + 101 * step + rank


class Noise:
    """What a cell draws after `cells.seed`: of torch's, numpy's and Python's generators."""

    def __init__(self, seed: int) -> None:
        """Begin."""
        self._torch = torch.Generator().manual_seed(seed)
        self._numpy = np.random.RandomState(seed)
        self._python = random.Random(seed)

    def draw(self) -> float:
        """Return the next sum of one number of each."""
        of_torch = torch.rand(1, generator=self._torch).item()
        return of_torch + self._numpy.rand() + self._python.random()

    def state(self) -> Any:
        """Return where they stand."""
        return self._torch.get_state(), self._numpy.get_state(), self._python.getstate()

    def put(self, state: Any) -> None:
        """Go back, or on, to a state."""
        self._torch.set_state(state[0])
        self._numpy.set_state(state[1])
        self._python.setstate(state[2])


def _samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, IN, generator=generator, dtype=torch.float64)
    return x, torch.tanh(x[:, :OUT] - x[:, OUT:]) + 0.1
