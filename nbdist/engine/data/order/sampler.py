"""The sampler of a loader: this rank's parts of global batches. Main thread."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from nbdist.engine.compat import torch_hooks
from nbdist.engine.data.batches import Seeds, Shard, cut, mix, part
from nbdist.engine.data.order.permutation import Permutation
from nbdist.engine.data.order.shards import data_shard
from nbdist.engine.data.reading.interleave import Interleave, lanes_of
from nbdist.engine.data.reading.reader import GroupFeed, RowBlock
from nbdist.engine.data.reading.retry import READ_TIMEOUT_S
from nbdist.engine.data.sources.source import Source
from nbdist.shared.errors import DataError, UsageError
from nbdist.shared.text import counted

_log = logging.getLogger("nbdist.data")
MANY = 2**28  # samples, from which on an order is not kept in memory: 2 GB, and seconds to draw
UNKNOWN = -1  # samples of a stream
Order = torch.Tensor | Permutation
Spec = tuple[int, ...]  # what decides which batches a loader gives


class Given(NamedTuple):
    """Positions of a global batch, those of a rank's part of it, and whose part it is."""

    batch: range
    part: range
    shard: Shard


class Seeded(list[int]):
    """A rank's samples of one batch by index, and what their random numbers follow from."""

    seed: Seeds
    spare: Mapping[int, int]  # other samples, by their place in the batch, that may stand in

    def __init__(
        self, indices: Iterable[int], seed: Seeds, spare: Mapping[int, int] | None = None
    ) -> None:
        super().__init__(indices)
        self.seed = seed
        self.spare = spare or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Seeded, (list(self), self.seed, self.spare)

    def one(self, nth: int) -> "Seeded":
        """Return a portion of one sample."""
        return Seeded([self[nth]], self.seed)

    def name(self, nth: int) -> int:
        """Return a sample's number in the dataset."""
        return self[nth]

    def others(self) -> "Iterator[tuple[int, Seeded]]":
        """Yield other samples' places in the batch and portions, to stand in for all of these."""
        return ((place, Seeded([index], self.seed)) for place, index in self.spare.items())


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
        self.has_spares = False  # of each batch, for a part that comes to nothing
        self.skips = False  # samples that cannot be loaded, instead of raising
        self.weights: tuple[float, ...] | None = None
        self.repeats = False  # samples, at several positions of an epoch
        self.alike: dict[str, int] = {}  # what must be the same on all ranks, see `alike`
        self.epoch = 0
        self.start = 0
        self._given: Iterator[Given] = iter(())  # of the pass

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_given": iter(())}

    def __len__(self) -> int:
        return len(self.ends(0))

    def ends(self, start: int) -> Sequence[int]:
        """Return where the batches from `start` on end, on as many ranks as there are now."""
        return cut(self.samples, start, self.global_batch, data_shard().count, self.drop_last)

    def spec(self) -> Spec:
        """Return what decides which batches come: two loaders with the same give the same."""
        return self.samples, self.global_batch, self.shuffle, self.seed, self.drop_last

    def state(self, consumed: int) -> dict[str, Any]:
        """Return a position, and what it is of: the same on every rank."""
        return {
            "epoch": self.epoch,
            "consumed": consumed,
            "seed": self.seed,
            "samples": self.samples,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Give the order that `state` was taken in; the epoch is set where a pass begins.

        Raises:
            UsageError: It is of another number of samples.
        """
        if state["samples"] != self.samples:
            raise UsageError(
                f"The state is of a dataset with {_length(state['samples'])}; this one has "
                f"{_length(self.samples)}.",
                why="the order of an epoch depends on their number",
                do="resume with the dataset that the state was taken from",
            )
        self.seed = state["seed"]

    def about(self) -> dict[str, Any]:
        """Return what a loader gives, for people."""
        return {
            "samples": self.samples,
            "global_batch": self.global_batch,
            "repeats": self.repeats,
            "alike": self.alike,
        }

    def __iter__(self) -> Iterator[Any]:
        return self._portions(self._order(self.epoch), self.start, self.ends(self.start))

    def begin(self) -> Iterator[Given]:
        """Begin a pass: return its parts of this rank, which `given` returns one by one, too."""
        ends, shard, weights = self.ends(self.start), data_shard(), self.weights
        self._given = parts(self.start, ends, shard, weights)
        return parts(self.start, ends, shard, weights)

    def _portions(self, order: Order | None, start: int, ends: Sequence[int]) -> Iterator[Seeded]:
        for end, (_, mine, shard) in zip(ends, self.begin(), strict=True):
            samples = range(start, end) if order is None else order[start:end].tolist()
            first, last = mine.start - start, mine.stop - start
            others = [*range(first), *range(last, len(samples))] if self.skips else []
            spare = {place: samples[place] for place in others}
            seed = Seeds(self.seed, self.epoch, start, shard.index)
            yield Seeded(samples[first:last], seed, spare)
            start = end

    def where(self, sample: int) -> str:
        """Return file and row group of a sample; "" where only its dataset may know."""
        return ""

    def given(self) -> Given:
        """Return the batch that a loop is given now: the oldest that it was not given yet."""
        return next(self._given)

    def is_at_end(self, start: int) -> bool:
        """Return whether an epoch has no batch from `start` on."""
        return not self.ends(start)

    def rest(self, consumed: int) -> range:
        """Return the positions that no rank is given where an epoch ends at `consumed`."""
        return range(consumed, self.samples)

    def samples_of(self, epoch: int) -> torch.Tensor | None:
        """Return the sample at each position of an epoch; None where each stands at one."""
        return None

    def ids(self, epoch: int, positions: Iterable[int]) -> list[int]:
        """Return which samples of the dataset stand at some positions of an epoch."""
        order = self._order(epoch)
        return [at if order is None else int(order[at]) for at in positions]

    def rows(self, epoch: int, part: range) -> list[int] | None:
        """Return which sample each row of a rank's part is; None where positions do not tell."""
        return self.ids(epoch, part)

    def _order(self, epoch: int) -> Order | None:
        if not self.shuffle:
            return None
        seed = mix(self.seed, epoch)
        if self.samples >= MANY:
            return Permutation(self.samples, seed)
        generator = torch.Generator().manual_seed(seed)
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
        self.timeout_s = READ_TIMEOUT_S  # for one group
        self.lanes = lanes_of(interleave, len(source.sizes), global_batch)
        self._is_told = False

    def spec(self) -> Spec:
        """Return what decides which batches come, the data too."""
        return *super().spec(), self.lanes, self.source.fingerprint

    def state(self, consumed: int) -> dict[str, Any]:
        """Return what a position is of, the interleaving and the data too."""
        return {**super().state(consumed), "lanes": self.lanes, "data": self.source.fingerprint}

    def load(self, state: dict[str, Any]) -> None:
        """Give the order that `state` was taken in, its interleaving too.

        Raises:
            UsageError: It is of other data.
            DataError: The data has changed since.
        """
        super().load(state)
        if state.get("data") != self.source.fingerprint:
            raise DataError(
                f"{self.source.name} is not the data that the state was taken from.",
                why="files were added, removed or rewritten since, in another size or grouping",
                do="resume with the same files, or the same version of the table",
            )
        self.lanes = state["lanes"]

    def __iter__(self) -> Iterator[RowBlock]:
        order = Interleave(self.source.sizes, self.lanes, self.shuffle, self.seed, self.epoch)
        ends, seed = self.ends(self.start), Seeds(self.seed, self.epoch)
        self._tell_shared_lanes()
        self.begin()
        return GroupFeed(
            self.source,
            order,
            self.start,
            ends,
            data_shard(),
            self.weights,
            seed,
            skips=self.skips,
            timeout_s=self.timeout_s,
        )

    def where(self, sample: int) -> str:
        """Return file and row group of a sample."""
        group = int(np.searchsorted(np.cumsum(self.source.sizes), sample, side="right"))
        return self.source.where(group)

    def _tell_shared_lanes(self) -> None:
        """Say once that several ranks read the same groups, for there are too few lanes."""
        shard = data_shard()
        if shard.count > self.lanes and shard.index == 0 and not self._is_told:
            _log.warning(
                "%d ranks share the samples of %s at a time, so each group is read by "
                "several of them. interleave=%d lets one rank read each, where the data has so "
                "many groups.",
                shard.count,
                counted(self.lanes, "row group"),
                shard.count,
            )
        self._is_told = True

    def ids(self, epoch: int, positions: Iterable[int]) -> list[int]:
        """Return the numbers of the samples that stand at some positions of an epoch.

        Of samples in one batch: there a position is any of its samples, for ranks take theirs in
        the order of lanes.
        """
        order = Interleave(self.source.sizes, self.lanes, self.shuffle, self.seed, epoch)
        return [self._id(order, at) for at in positions]

    def rows(self, epoch: int, part: range) -> list[int] | None:
        """Return None: within a batch, ranks take samples in the order of lanes."""
        return None

    def _id(self, order: Interleave, position: int) -> int:
        (piece,) = order.pieces(position, position + 1, range(position, position + 1))
        rows = order.rows(piece.group)
        row = piece.start if rows is None else int(rows[piece.start])
        return int(order.ids(piece.group)[row])


def parts(
    start: int, ends: Iterable[int], shard: Shard, weights: tuple[float, ...] | None
) -> Iterator[Given]:
    """Return the batches that end at `ends`, and a shard's part of each."""
    for end in ends:
        yield Given(range(start, end), part(start, end, shard, weights), shard)
        start = end


def is_shared_out(iterator: Any) -> bool:
    """Return whether a DataLoader's iterator gives this rank its own part of the samples."""
    sampler = torch_hooks.sampler_of(iterator)
    return isinstance(sampler, Batches | DistributedSampler)


def _length(samples: int) -> str:
    return "no length (a stream)" if samples == UNKNOWN else counted(samples, "sample")
