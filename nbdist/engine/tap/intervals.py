"""Arithmetic on intervals of time, as pairs (start, end) of integers in one unit."""

from collections.abc import Iterable
from heapq import heapify, heapreplace
from math import inf


def union(intervals: Iterable[tuple[int, int]], *, since: int = 0, until: int | None = None) -> int:
    """Return how long at least one of the intervals lasted; overlap counts once.

    Args:
        intervals: In any order; one that ends before it starts counts nothing.
        since: Earlier times are cut off.
        until: Later times are cut off.
    """
    total = 0
    reached = since
    for start, end in sorted(intervals):
        if until is not None and end > until:
            end = until
        start = max(start, reached)
        if end > start:
            total += end - start
            reached = end
    return total


def merged(
    intervals: Iterable[tuple[int, int]], *, since: int, until: int
) -> list[tuple[int, int]]:
    """Return the times between `since` and `until` in which at least one interval lasted."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        start, end = max(start, since), min(end, until)
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def without(
    intervals: Iterable[tuple[int, int]], holes: Iterable[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return what is left of disjoint intervals when the holes are cut out."""
    left = list(intervals)
    for start, end in holes:
        left = [
            part
            for a, b in left
            for part in ((a, min(b, start)), (max(a, end), b))
            if part[0] < part[1]
        ]
    return left


def begins(
    operations: Iterable[tuple[int, int | None]], workers: int, busy: Iterable[int | None] = ()
) -> list[int]:
    """Return when each operation was taken up by one of a backend's workers.

    gloo carries out operations in the order of the calls, on `options.threads` workers of
    each backend. gloo does not report when a worker takes an operation up; it follows from when
    each was handed over and when each ended: the next one goes to the worker that is free first.

    Args:
        operations: When each was handed over, in that order, and its end: None while under way.
        workers: How many the backend has, at least 1.
        busy: Ends of operations that had been taken up before, None while under way.
    """
    ends = sorted(inf if end is None else end for end in busy)[-workers:]
    free: list[float] = [0] * (workers - len(ends)) + ends
    heapify(free)
    found = []
    for handed, end in operations:
        # No worker is free: something was under way whose end was missed. Then it did not queue.
        begin = handed if free[0] == inf else max(handed, int(free[0]))
        if end is not None:
            begin = min(begin, end)
        found.append(begin)
        heapreplace(free, inf if end is None else end)
    return found
