"""Count how often each position of an epoch was given, from ranks' journals. Pure: no torch.

Parts are intervals of positions: they are counted by sorting their ends, whatever the number of
samples.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nbdist.engine.data.position.journal import (
    BEFORE,
    FORGOTTEN,
    GIVEN,
    LEFT_OUT,
    OVER,
    SKIPPED,
    JournalEntry,
)

FIRST = 5  # positions that are named of each kind

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Kind:
    """How many samples, and the first positions of them."""

    count: int = 0
    first: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EpochCounts:
    """One epoch of one loader, over all ranks.

    `once`, `missing` and `repeated` count samples, and so do `left_out` (dropped, or too few for
    the ranks), `skipped` (could not be read), `before` (given in another session) and `to_come` (of
    an epoch that is not over). `samples` is None for a stream that has not come to its end.
    """

    samples: int | None
    once: int
    missing: Kind
    repeated: Kind
    left_out: Kind
    skipped: Kind
    before: int
    to_come: int


def by_epoch(entries: Iterable[JournalEntry]) -> dict[tuple[int, int], list[JournalEntry]]:
    """Return the entries by (loader, epoch); without epochs whose entries are not all kept."""
    found: dict[tuple[int, int], list[JournalEntry]] = {}
    forgotten: dict[int, int] = {}
    for entry in entries:
        if entry.kind == FORGOTTEN:
            forgotten[entry.loader] = max(entry.epoch, forgotten.get(entry.loader, -1))
        else:
            found.setdefault((entry.loader, entry.epoch), []).append(entry)
    return {key: each for key, each in found.items() if key[1] > forgotten.get(key[0], -1)}


def count(
    entries: Sequence[JournalEntry],
    samples: int | None,
    *,
    is_followed: bool,
    order: Ints | None = None,
) -> EpochCounts:
    """Count one epoch.

    Args:
        entries: Of all ranks, of one loader and epoch.
        samples: In an epoch; None where it is not known before its end.
        is_followed: A later epoch has begun: nothing of this one is to come.
        order: The sample at each position, where one may stand at several. Samples are counted
            then, of those that the order has, and named in place of positions.
    """
    ends = [entry.start for entry in entries if entry.kind == OVER]
    is_over = is_followed or bool(ends)
    samples = max(ends, default=None) if samples is None else samples
    starts, stops = _parts(entries)
    left = _ranges(entries, LEFT_OUT)
    bad = _ranges(entries, SKIPPED)
    before = max((entry.size for entry in entries if entry.kind == BEFORE), default=0)
    furthest = max([int(stops.max(initial=0)), before, *(stop for _, stop in left)])
    end = furthest if samples is None else max(samples, furthest)
    edges = np.unique(
        np.concatenate(
            [starts, stops, np.array([0, end, before, furthest, *_flat(left), *_flat(bad)])]
        )
    ).astype(np.int64)
    times = _times(edges, starts, stops)
    lengths, lows = np.diff(edges), edges[:-1]
    is_left, is_bad = _within(lows, left), _within(lows, bad)
    is_before = lows < before
    is_to_come = (lows >= furthest) & (not is_over)
    if order is not None:
        marks = np.stack([is_left, is_bad, is_before, is_to_come])
        lows, times, marks = _by_sample(
            order[:end], np.repeat(times, lengths), np.repeat(marks, lengths, axis=1)
        )
        lengths, (is_left, is_bad, is_before, is_to_come) = np.ones_like(lows), marks
        samples = len(lows)
    is_to_come &= times == 0
    is_missing = (times == 0) & ~is_left & ~is_before & ~is_to_come

    def kind(chosen: npt.NDArray[np.bool_]) -> Kind:
        return _kind(lows[chosen], lengths[chosen])

    return EpochCounts(
        samples,
        int(lengths[(times == 1) & ~is_bad].sum()),
        kind(is_missing),
        kind((times > 1) & ~is_bad),
        kind((times == 0) & is_left),
        kind(is_bad),
        int(lengths[(times == 0) & is_before].sum()),
        int(lengths[is_to_come].sum()),
    )


def _by_sample(
    order: Ints, times: Ints, marks: npt.NDArray[np.bool_]
) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    """Return samples, how often each was given, and the marks that any of its positions has.

    Args:
        order: The sample at each position.
        times: How often each position was given.
        marks: bool[kinds, positions].
    """
    samples, nth = np.unique(order, return_inverse=True)
    given = np.bincount(nth, weights=times).astype(np.int64)
    return samples, given, np.stack([np.bincount(nth, weights=mark) > 0 for mark in marks])


def _parts(entries: Sequence[JournalEntry]) -> tuple[Ints, Ints]:
    """Return where the parts begin and end; one that several ranks get by design counts once."""
    rows = [np.empty((0, 5), np.int64)]
    for entry in dict.fromkeys(entry for entry in entries if entry.kind == GIVEN):
        nth = np.arange(entry.batches, dtype=np.int64)
        starts = entry.start + nth * entry.size + entry.offset
        shard = np.full_like(nth, entry.shard), np.full_like(nth, entry.shards)
        rows.append(np.stack([entry.serial + nth, starts, starts + entry.length, *shard], axis=1))
    parts = np.unique(np.concatenate(rows), axis=0)
    return parts[:, 1], parts[:, 2]


def _ranges(entries: Sequence[JournalEntry], kind: int) -> list[tuple[int, int]]:
    return sorted({(e.start, e.start + e.size) for e in entries if e.kind == kind})


def _flat(ranges: list[tuple[int, int]]) -> list[int]:
    return [edge for pair in ranges for edge in pair]


def _times(edges: Ints, starts: Ints, stops: Ints) -> Ints:
    """Return how many parts cover each interval between two edges: int64[edges - 1]."""
    change = np.zeros(len(edges), dtype=np.int64)
    np.add.at(change, np.searchsorted(edges, starts), 1)
    np.add.at(change, np.searchsorted(edges, stops), -1)
    return np.cumsum(change)[:-1]


def _within(lows: Ints, ranges: list[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Return which intervals, by their beginnings, lie in one of the ranges."""
    change = np.zeros(len(lows) + 1, dtype=np.int64)
    for start, stop in ranges:
        change[np.searchsorted(lows, start)] += 1
        change[np.searchsorted(lows, stop)] -= 1
    inside: npt.NDArray[np.bool_] = np.cumsum(change)[:-1] > 0
    return inside


def _kind(lows: Ints, lengths: Ints) -> Kind:
    first: list[int] = []
    for low, length in zip(lows.tolist(), lengths.tolist(), strict=True):
        first += range(low, low + min(length, FIRST - len(first)))
        if len(first) == FIRST:
            break
    return Kind(int(lengths.sum()), tuple(first))
