"""Cut an epoch into global batches, and a global batch into the ranks' parts. Pure: no torch.

cut     positions 0 ... samples into global batches; a remainder smaller than the number of
ranks joins the batch before, so that no rank is ever without a sample
part    of a batch for each rank: contiguous; sizes differ by at most one, or follow weights
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple, overload


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of every batch is this rank's: `index` of `count`."""

    index: int
    count: int


class Seeds(NamedTuple):
    """What the random numbers of a rank's part of a batch follow from.

    Not from the worker that makes it, nor from what that has made before: another one may make it
    again, after a fault or in another session.
    """

    loader: int
    epoch: int
    start: int = 0  # where the batch begins
    shard: int = 0  # whose part it is

    def of_sample(self, number: int) -> int:
        """Return the seed of a sample's transform, the same on any number of ranks."""
        return mix(self.loader, self.epoch, number)

    def of_part(self) -> int:
        """Return the seed of what else is drawn where the part is made."""
        return mix(self.loader, self.epoch, self.start, self.shard)


class Ends(Sequence[int]):
    """Where batches end: ends at even distances, and one more. Its length takes no memory."""

    def __init__(self, even: range, last: int | None = None) -> None:
        self._even, self._last = even, [] if last is None else [last]

    def __len__(self) -> int:
        return len(self._even) + len(self._last)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(self._even, self._last)

    @overload
    def __getitem__(self, nth: int) -> int: ...
    @overload
    def __getitem__(self, nth: slice) -> list[int]: ...
    def __getitem__(self, nth: int | slice) -> int | list[int]:
        """Return one end, or several."""
        if isinstance(nth, slice):
            return [self[one] for one in range(len(self))[nth]]
        nth = range(len(self))[nth]
        return self._even[nth] if nth < len(self._even) else self._last[0]


def cut(samples: int, start: int, global_batch: int, ranks: int, drop_last: bool) -> Ends:
    """Return the ends of the batches that cover `range(start, samples)`.

    Args:
        samples: How many samples an epoch has.
        start: How many are consumed already; not a multiple of `global_batch` when the epoch
            was begun with another size.
        global_batch: Samples in a batch, over all ranks.
        ranks: A last batch with fewer samples than this joins the one before. Where there is
            none before (only after a resume on more ranks) it is left out, and a warning says so.
        drop_last: Leave out a last batch that is not full.
    """
    ends = range(start + global_batch, samples + 1, global_batch)
    rest = samples - (ends[-1] if ends else start)
    if rest and not drop_last:
        if rest >= ranks:
            return Ends(ends, samples)
        if ends:
            return Ends(ends[:-1], samples)
    return Ends(ends)


def part(start: int, end: int, shard: Shard, weights: Sequence[float] | None = None) -> range:
    """Return the positions of one rank in the batch `range(start, end)`.

    Args:
        start: Where the batch begins.
        end: Where it ends.
        shard: Which part.
        weights: One positive number a shard: sizes follow them. Without, the first
            `(end - start) % count` shards have one sample more than the others.
    """
    if weights is not None:
        ends = tuple(itertools.accumulate(shares(end - start, tuple(weights)), initial=start))
        return range(ends[shard.index], ends[shard.index + 1])
    base, extra = divmod(end - start, shard.count)
    first = start + shard.index * base + min(shard.index, extra)
    return range(first, first + base + (shard.index < extra))


@lru_cache(maxsize=256)
def shares(samples: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return how many of `samples` each shard gets: proportional to its weight, at least one.

    There is a sample for each shard at least, and weights are positive. Those whose due is less
    than one get one; the others share the rest, whole numbers first and then one more for the
    largest remainders, of equal ones for the first shards. Exact: every rank finds the same,
    whatever its processor.

    Source: the method of largest remainders (Hamilton's).
    """
    due = [Fraction(weight) for weight in weights]
    small: set[int] = set()
    while True:
        rest, total = samples - len(small), sum(d for i, d in enumerate(due) if i not in small)
        below = {i for i, d in enumerate(due) if i not in small and d * rest < total}
        if not below:
            break
        small |= below
    exact = [Fraction(1) if i in small else d * rest / total for i, d in enumerate(due)]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(len(due)), key=lambda i: sizes[i] - exact[i])  # stable
    for i in by_remainder[: samples - sum(sizes)]:
        sizes[i] += 1
    return tuple(sizes)


def mix(*numbers: int) -> int:
    """Return a seed for torch (63 bits) from several numbers; all of them matter.

    A sum would not do: seed 0 in epoch 1 would be seed 1 in epoch 0.
    """
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
