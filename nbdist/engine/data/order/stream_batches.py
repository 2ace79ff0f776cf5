"""The batch sampler of a stream: it reads the samples itself, and gives this rank its parts.

The end comes as it comes: a batch is given when it is known that so many samples follow it that
the rest is no smaller than the number of ranks, or joins it. Main thread.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from nbdist.engine.data import making
from nbdist.engine.data.batches import Seeds, part
from nbdist.engine.data.order.sampler import UNKNOWN, Batches, Given, Spec
from nbdist.engine.data.order.shards import data_shard
from nbdist.engine.data.order.streams import Note, SampleStream


@dataclass(frozen=True, slots=True)
class Samples:
    """A rank's samples of one batch, their numbers in the stream, and what is drawn for them."""

    samples: list[Any]
    ids: list[int]
    seed: Seeds
    # Others, with their numbers, by their place in the batch, that may stand in.
    spare: Mapping[int, tuple[int, Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.samples)

    def one(self, nth: int) -> "Samples":
        """Return a portion of one sample."""
        return Samples([self.samples[nth]], [self.ids[nth]], self.seed)

    def name(self, nth: int) -> int:
        """Return a sample's number in the stream."""
        return self.ids[nth]

    def others(self) -> "Iterator[tuple[int, Samples]]":
        """Yield other samples' places in the batch and portions, to stand in for all of these."""
        return (
            (place, Samples([sample], [number], self.seed))
            for place, (number, sample) in self.spare.items()
        )


class StreamBatches(Batches):
    """This rank's part of each batch of a stream, from a set epoch and position on."""

    def __init__(self, stream: SampleStream, global_batch: int, drop_last: bool) -> None:
        super().__init__(UNKNOWN, global_batch, stream.shuffle, stream.seed, drop_last)
        self.stream = stream
        self._fetched: deque[Given] = deque()
        self._read = 0  # samples of the epoch

    def __len__(self) -> NoReturn:
        raise TypeError("a loader over a stream has no length: its end is not known before it ends")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fetched": deque()}

    def ends(self, start: int) -> NoReturn:
        """Refuse: see `__len__`."""
        raise TypeError("a loader over a stream does not know how many batches are left")

    def is_at_end(self, start: int) -> bool:
        """Say no: where a stream ends is not known before it is read."""
        return False

    def spec(self) -> Spec:
        """Return what decides which batches come, as far as a stream tells."""
        return *super().spec(), self.stream.window

    def about(self) -> dict[str, Any]:
        """Return what a loader gives, for people."""
        return {**super().about(), "samples": None}

    def state(self, consumed: int) -> dict[str, Any]:
        """Return what a position is of, with the stream's own state near it."""
        first = consumed // self.stream.window * self.stream.window
        note = self.stream.nearest(self.epoch, first)
        return {
            **super().state(consumed),
            "window": self.stream.window,
            "stream": None if note is None else tuple(note),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Give the order that `state` was taken in.

        Raises:
            UsageError: It is of a dataset with a length.
        """
        super().load(state)
        if (self.stream.seed, self.stream.window) != (state["seed"], state["window"]):
            self.stream.notes.clear()  # they are of another order
        self.stream.seed, self.stream.window = state["seed"], state["window"]
        if state["stream"] is not None:
            self.stream.notes.append(Note(*state["stream"]))

    def given(self) -> Given:
        """Return the oldest batch that was fetched, and that no loop was given yet."""
        return self._fetched.popleft()

    def rest(self, consumed: int) -> range:
        """Return the positions at the end that no rank is given, when a loop has come there."""
        return range(consumed, self._read)

    def ids(self, epoch: int, positions: Iterable[int]) -> list[int]:
        """Return the positions: which samples stand there is known when the stream is read."""
        return list(positions)

    def rows(self, epoch: int, part: range) -> list[int] | None:
        """Return None: a stream has no samples by number."""
        return None

    def __iter__(self) -> Iterator[Samples]:
        self._fetched.clear()
        self._read = self.start
        return self._blocks(self.epoch, self.start)

    def _blocks(self, epoch: int, start: int) -> Iterator[Samples]:
        shard, weights, size = data_shard(), self.weights, self.global_batch
        samples = self.stream.read(epoch, start)
        ahead: list[tuple[int, Any]] = []
        while True:
            with making.here.part("read"):
                ahead += itertools.islice(samples, size + shard.count - len(ahead))
            self._read = start + len(ahead)
            length = _length(len(ahead), size, shard.count, self.drop_last)
            if not length:
                return
            mine = part(start, start + length, shard, weights)
            self._fetched.append(Given(range(start, start + length), mine, shard))
            first, last = mine.start - start, mine.stop - start
            numbers, its = zip(*ahead[first:last], strict=True)
            others = [*range(first), *range(last, length)] if self.skips else []
            spare = {place: ahead[place] for place in others}
            seed = Seeds(self.seed, epoch, start, shard.index)
            yield Samples(list(its), list(numbers), seed, spare)
            start, ahead = start + length, ahead[length:]


def _length(ahead: int, size: int, ranks: int, drop_last: bool) -> int:
    """Return how many samples the next batch has; 0 at the end.

    Args:
        ahead: Samples that were read: `size + ranks`, or fewer where no more come.
        size: Of a batch.
        ranks: A rest of fewer joins the batch before.
        drop_last: A rest is left out instead.
    """
    if ahead < size:
        return 0 if drop_last or ahead < ranks else ahead
    return ahead if size < ahead < size + ranks and not drop_last else size
