"""Put the calls of all ranks beside each other: which make one collective, and who came last.

Calls of a collective meet by group and number in it; a send and its recv by group, sender,
receiver, tag and number among those. Pure, on arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nbdist.client.metrics.analysis.rows import NUMBERS, CallRows, Ints


@dataclass(frozen=True, slots=True)
class Meetings:
    """Collectives and messages, as far as rows of them were recorded.

    `rows` are sorted so that those of one meeting follow each other, by rank; `first` is where each
    one's begin and `count` how many there are. Of the meetings that `is_whole`, with the rows of
    all their ranks: `arrived`, the moment of the last launch, and `last`, whose it was; of others
    both are -1.
    """

    rows: CallRows
    first: Ints
    count: Ints
    is_whole: npt.NDArray[np.bool_]
    arrived: Ints
    last: Ints

    def __len__(self) -> int:
        return len(self.first)

    def of_rows(self) -> Ints:
        """Return for each row the meeting it belongs to."""
        return np.repeat(np.arange(len(self)), self.count)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """For each row, until when its rank waited for another: `moment`, and for `whom`.

    Where no rank is known to have been missing `moment` is the row's launch and `whom` -1.
    """

    moment: Ints
    whom: Ints


def match(rows: CallRows, sizes: Sequence[int]) -> Meetings:
    """Return which rows meet.

    Args:
        rows: Of all ranks, in the order in which they came.
        sizes: How many ranks each meeting takes, by its number; 0 when that is not known.
    """
    key = rows.meeting * NUMBERS + rows.number
    order = np.lexsort((rows.rank, key))
    key, rows = key[order], rows.at(order)
    same = key[1:] == key[:-1]
    # A rank's number comes again only with a group that was made again: the newer one counts.
    is_stale = np.zeros(len(rows), bool)
    is_stale[:-1] = same & (rows.rank[1:] == rows.rank[:-1])
    if is_stale.any():
        key, rows = key[~is_stale], rows.at(~is_stale)
        same = key[1:] == key[:-1]
    starts = np.ones(len(rows), bool)
    starts[1:] = ~same
    first = np.flatnonzero(starts)
    count = np.diff(first, append=len(rows))
    wanted = np.asarray(sizes, np.int64)[rows.meeting[first]]
    is_whole = (count == wanted) & (count > 0)
    arrived, last = np.full(len(first), -1, np.int64), np.full(len(first), -1, np.int64)
    if len(first):
        latest = np.maximum.reduceat(rows.launch, first)
        is_latest = rows.launch == np.repeat(latest, count)
        whose = np.maximum.reduceat(np.where(is_latest, rows.rank, -1), first)
        arrived[is_whole], last[is_whole] = latest[is_whole], whose[is_whole]
    return Meetings(rows, first, count, is_whole, arrived, last)


def arrivals(meetings: Meetings, is_symmetric: npt.NDArray[np.bool_]) -> Arrivals:
    """Return what each row's rank waited for.

    A call can wait only for those that launched before it ended: a broadcast's root has gone on
    before the last rank came, and a small message is sent before anybody receives it.

    Args:
        meetings: See `match`.
        is_symmetric: By family: whether it ends on no rank before all have launched it
            (`collectives.waits_for_all`): whoever seems to end before is wrong by its clock.
    """
    rows, of_row = meetings.rows, meetings.of_rows()
    known = meetings.is_whole[of_row] if len(rows) else np.zeros(0, bool)
    moment = np.where(known, meetings.arrived[of_row], rows.launch)
    whom = np.where(known, meetings.last[of_row], -1)
    ended_before = rows.end < moment
    moment = np.where(ended_before & is_symmetric[rows.family], rows.end, moment)
    for row in np.flatnonzero(ended_before & ~is_symmetric[rows.family]):
        begin = meetings.first[of_row[row]]
        launches = rows.launch[begin : begin + meetings.count[of_row[row]]]
        before = np.where(launches <= rows.end[row], launches, -1)
        latest = int(before.argmax())
        moment[row], whom[row] = launches[latest], rows.rank[begin + latest]
    return Arrivals(moment, np.where(whom == rows.rank, -1, whom))
