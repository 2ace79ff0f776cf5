"""Arithmetic on intervals of time, as pairs (start, end) of integers in one unit."""

from collections.abc import Iterable


def union(intervals: Iterable[tuple[int, int]], *, since: int = 0, until: int | None = None) -> int:
    """Return how long at least one of the intervals lasted; overlap counts once.

    Args:
        intervals: In any order; one that ends before it starts counts nothing.
        since: What lies before is cut off.
        until: What lies behind is cut off.
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
