"""When a backend's workers took up operations that were handed to them: arithmetic.

gloo carries out what it is asked to in the order of the calls, on `options.threads` workers of each
backend. Nobody tells when a worker takes an operation up; it follows from when each was handed over
and when each ended: the next one goes to the worker that is free first.
"""

from collections.abc import Iterable
from heapq import heapify, heapreplace
from math import inf


def begins(
    operations: Iterable[tuple[int, int | None]], workers: int, busy: Iterable[int | None] = ()
) -> list[int]:
    """Return when each operation was taken up.

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
