"""The sampler of a loader: this rank's parts of global batches. Main thread."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from nbdist.engine.compat import torch_hooks
from nbdist.engine.data.batches import cut, mix, part
from nbdist.engine.data.interleave import Interleave
from nbdist.engine.data.reader import Block, Feed
from nbdist.engine.data.shards import data_shard
from nbdist.engine.data.sources.source import Source
from nbdist.errors import DataError, UsageError

Spec = tuple[int, ...]  # what decides which batches a loader gives


class Seeded(list[int]):
    """A rank's samples of one batch by index, and the seed of their transforms."""

    seed: tuple[int, int]  # the loader's, and the epoch

    def __init__(self, indices: Iterable[int], seed: tuple[int, int]) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return Seeded, (list(self), self.seed)


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

    def state(self) -> dict[str, int]:
        """Return what a position is of: the same on every rank."""
        return {"epoch": self.epoch, "seed": self.seed, "samples": self.samples}

    def load(self, state: dict[str, int]) -> None:
        """Give the order that `state` was taken in; the epoch is set where a pass begins.

        Raises:
            UsageError: It is of another number of samples.
        """
        if state["samples"] != self.samples:
            raise UsageError(
                f"The state is of a dataset with {state['samples']} samples; this one has "
                f"{self.samples}.",
                why="the order of an epoch depends on their number",
                do="resume with the dataset that the state was taken from",
            )
        self.seed = state["seed"]

    def __iter__(self) -> Iterator[Any]:
        shard, start = data_shard(), self.start
        order = self._order()
        for end in self.ends(start):
            positions = part(start, end, shard, self.weights)
            chosen = (
                positions if order is None else order[positions.start : positions.stop].tolist()
            )
            yield Seeded(chosen, (self.seed, self.epoch))
            start = end

    def _order(self) -> torch.Tensor | None:
        if not self.shuffle:
            return None
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        return torch.randperm(self.samples, generator=generator)


class SourceBatches(Batches):
    """The batch sampler of a source: it gives the samples themselves, read ahead in this process.

    So no worker opens a file; what is read travels to workers, which transform and collate it.
    """

    def __init__(self, source: Source, global_batch: int, interleave: int, **how: Any) -> None:
        """Begin at the first epoch.

        Args:
            source: Where samples are read.
            global_batch: Samples in a batch.
            interleave: Of how many groups samples are mixed, where there are as many.
            how: As for `Batches`.
        """
        super().__init__(int(source.sizes.sum()), global_batch, **how)
        self.source = source
        self.lanes = min(interleave, len(source.sizes))

    def spec(self) -> Spec:
        """Return what decides which batches come, the data too."""
        return *super().spec(), self.lanes, self.source.fingerprint

    def state(self) -> dict[str, int]:
        """Return what a position is of, the interleaving and the data too."""
        return {**super().state(), "lanes": self.lanes, "data": self.source.fingerprint}

    def load(self, state: dict[str, int]) -> None:
        """Give the order that `state` was taken in, its interleaving too.

        Raises:
            UsageError: It is of other data.
            DataError: The data has changed since.
        """
        super().load(state)
        if state.get("data") != self.source.fingerprint:
            raise DataError(
                f"{self.source.name} is not the data that the state was taken from.",
                why="files were added, removed or written anew since, in another size or grouping",
                do="resume with the same files, or the same version of the table",
            )
        self.lanes = state["lanes"]

    def __iter__(self) -> Iterator[Block]:
        order = Interleave(self.source.sizes, self.lanes, self.shuffle, self.seed, self.epoch)
        ends, seed = self.ends(self.start), (self.seed, self.epoch)
        return Feed(self.source, order, self.start, ends, data_shard(), self.weights, seed)


def is_shared_out(iterator: Any) -> bool:
    """Return whether a DataLoader's iterator gives this rank its own part of the samples."""
    sampler = torch_hooks.sampler_of(iterator)
    return isinstance(sampler, Batches | DistributedSampler)
