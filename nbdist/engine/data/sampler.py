"""The sampler of a loader: this rank's parts of global batches. Main thread."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from nbdist.engine.compat import torch_hooks
from nbdist.engine.data.batches import cut, mix, part
from nbdist.engine.data.shards import data_shard

Spec = tuple[int, int, bool, int, bool]  # what decides which batches a loader gives


class Batches:
    """The batch sampler: this rank's part of each batch, from a set epoch and position on."""

    def __init__(
        self, samples: int, global_batch: int, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        self.samples = samples
        self.global_batch = global_batch
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.weights: tuple[float, ...] | None = None
        self.epoch = 0
        self.start = 0

    def __len__(self) -> int:
        return len(self.ends(0))

    def ends(self, start: int) -> list[int]:
        """Return where the batches from `start` on end, on as many ranks as there are now."""
        return cut(self.samples, start, self.global_batch, data_shard().count, self.drop_last)

    def spec(self) -> Spec:
        """Return what decides which batches come: two loaders with the same give the same."""
        return self.samples, self.global_batch, self.shuffle, self.seed, self.drop_last

    def __iter__(self) -> Iterator[list[int]]:
        shard, start = data_shard(), self.start
        order = self._order()
        for end in self.ends(start):
            positions = part(start, end, shard, self.weights)
            if order is None:
                yield list(positions)
            else:
                yield order[positions.start : positions.stop].tolist()
            start = end

    def _order(self) -> torch.Tensor | None:
        if not self.shuffle:
            return None
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        return torch.randperm(self.samples, generator=generator)


def is_shared_out(iterator: Any) -> bool:
    """Return whether a DataLoader's iterator gives this rank its own part of the samples."""
    sampler = torch_hooks.sampler_of(iterator)
    return isinstance(sampler, Batches | DistributedSampler)
