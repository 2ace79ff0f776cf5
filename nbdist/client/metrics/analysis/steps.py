"""Divide the time for which ranks were blocked into transferring and waiting, and say for whom.

At a moment in which a rank's main thread is blocked, it is *waiting* when a call of its own has
been launched and a rank is missing in it, and no other call of its own that has arrived is under
way: then nothing moves. It waits for the rank that comes last to the calls that are pending then.
At any other moment something moves, or has just moved: it is *transferring*. Pure, on arrays.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nbdist.client.metrics.analysis.match import Arrivals
from nbdist.client.metrics.analysis.rows import CallRows, Ints, Waits

_LEAST = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class BlockedTime:
    """Blocked time in nanoseconds, for each pair of a rank and a step that was asked for.

    `waiting` and `transfer` sum to the pair's blocked time; `waiting_for` has a row for each pair
    and a column for each rank.
    """

    waiting: Ints
    transfer: Ints
    waiting_for: Ints


def split(
    calls: CallRows, arrivals: Arrivals, waits: Waits, pair: Ints, pairs: int, n: int
) -> BlockedTime:
    """Divide blocked times.

    Args:
        calls: Calls of all ranks.
        arrivals: Beside `calls`.
        waits: The blocked times; those of one rank do not overlap.
        pair: To which pair of rank and step each belongs, in `range(pairs)`.
        pairs: How many there are.
        n: One more than the greatest rank.
    """
    if not len(waits):
        empty = np.zeros(pairs, np.int64)
        return BlockedTime(empty, empty.copy(), np.zeros((pairs, n), np.int64))
    # All ranks' moments on one axis, one rank's behind the other's: one pass for all of them.
    moments = (calls.launch, calls.begin, calls.end, arrivals.moment, waits.begin, waits.end)
    begin = min(int(m.min()) for m in moments if len(m))
    length = max(int(m.max()) for m in moments if len(m)) - begin + 1
    of_call, of_wait = calls.rank * length - begin, waits.rank * length - begin
    launch, end = calls.launch + of_call, calls.end + of_call
    arrived = arrivals.moment + of_call
    moving = np.maximum(calls.begin + of_call, arrived)
    blocked_from, blocked_to, pair = _disjoint(waits.begin + of_wait, waits.end + of_wait, pair)

    edges = np.sort(np.concatenate((launch, arrived, moving, end, blocked_from, blocked_to)))
    at, lasts = edges[:-1], np.diff(edges)
    block = np.searchsorted(blocked_from, at, "right") - 1
    is_blocked = (block >= 0) & (at < blocked_to[block])
    at, lasts, block = at[is_blocked], lasts[is_blocked], block[is_blocked]
    missing = np.where(_is_moving(moving, end, at), -1, _missing(launch, arrived, arrivals, at))

    is_waiting = missing >= 0
    waiting_for = np.bincount(
        pair[block[is_waiting]] * n + missing[is_waiting],
        weights=lasts[is_waiting],
        minlength=pairs * n,
    ).reshape(pairs, n)
    exposed = np.bincount(pair, weights=blocked_to - blocked_from, minlength=pairs)
    waiting = waiting_for.sum(axis=1)
    return BlockedTime(
        *(np.rint(part).astype(np.int64) for part in (waiting, exposed - waiting, waiting_for))
    )


def _disjoint(begin: Ints, end: Ints, pair: Ints) -> tuple[Ints, Ints, Ints]:
    """Return times in order, those that overlap cut so that no moment counts twice."""
    order = np.argsort(begin, kind="stable")
    begin, end, pair = begin[order], end[order], pair[order]
    before = np.concatenate(([_LEAST], np.maximum.accumulate(end)[:-1]))
    begin = np.minimum(np.maximum(begin, before), np.maximum(end, before))
    return begin, np.maximum(end, begin), pair


def _is_moving(begin: Ints, end: Ints, at: Ints) -> npt.NDArray[np.bool_]:
    """Return at which moments a call that has arrived is under way."""
    begun = np.searchsorted(np.sort(np.minimum(begin, end)), at, "right")
    ended = np.searchsorted(np.sort(end), at, "right")
    return begun > ended


def _missing(launch: Ints, arrived: Ints, arrivals: Arrivals, at: Ints) -> Ints:
    """Return for each moment the rank that comes last to the calls pending then; -1: none is."""
    if not len(launch):
        return np.full(len(at), -1, np.int64)
    order = np.argsort(launch, kind="stable")
    arrived, whom = arrived[order], arrivals.whom[order]
    # Of the calls launched so far, the one that arrives last: when it has not yet, it is pending.
    latest = np.maximum.accumulate(arrived)
    is_new = arrived == latest
    which = np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))
    call = np.searchsorted(launch[order], at, "right") - 1
    is_pending = (call >= 0) & (at < latest[call])
    return np.where(is_pending, whom[which[call]], -1)
