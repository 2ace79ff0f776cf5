"""The samples of a trial's models, alike on a rank and in the shadow. float64.

By index: each rank has six samples of its own for each step. By a loader: a data set, of which each
rank has a part of each global batch.
"""

import torch
from torch.utils.data import TensorDataset

from tests.random.trial import GLOBAL_BATCH, STEPS_OF_EPOCH

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


def _samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, IN, generator=generator, dtype=torch.float64)
    return x, torch.tanh(x[:, :OUT] - x[:, OUT:]) + 0.1
