"""The table of recent collectives, a row for equal ones. Threads: belongs to `nbdist-analysis`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nbdist.client.metrics.analysis.match import Meetings
from nbdist.client.metrics.analysis.rows import Columns, Family, Ints
from nbdist.client.metrics.analysis.values import RECENT, CollectiveRow
from nbdist.shared.collectives import algorithm_bytes, bus_factor, waits_for_all

MOST_MEETINGS = 100_000  # of recent steps; beyond it fewer steps are recent
MOST_ROWS = 256
_MS = 1e-6  # in a nanosecond


@dataclass(frozen=True, slots=True)
class MatchedCollectives(Columns):
    """Collectives, one at each index, as they enter the table; times in nanoseconds.

    The times and `last` count where `is_whole` alone.
    """

    step: Ints
    family: Ints
    is_whole: npt.NDArray[np.bool_]
    skew: Ints
    waiting: Ints
    queue: Ints
    transfer: Ints
    last: Ints


def met(meetings: Meetings, families: Sequence[Family]) -> MatchedCollectives:
    """Return what the table counts of each meeting.

    Times are means over its ranks, but for the skew; waiting is that of the ranks that waited. It
    began to transfer when it had arrived and all ranks had taken it up, and is over when it is on
    the mean of the ranks. Where some go on before others, as in a broadcast, and of messages, the
    last end counts.
    """
    rows, first, count = meetings.rows, meetings.first, meetings.count
    if not len(first):
        none = np.zeros(0, np.int64)
        return MatchedCollectives(none, none, none.astype(bool), none, none, none, none, none)
    family = _families(meetings, families)
    is_symmetric = np.array([waits_for_all(f.kind) for f in families], bool)[family]
    arrived = meetings.arrived
    launched = np.minimum.reduceat(rows.launch, first)
    # Sums of moments would not fit: of what lies behind the meeting's first moment they do.
    since = np.repeat(launched, count)
    early = np.repeat(arrived, count) - rows.launch
    waited = np.maximum(np.add.reduceat(early > 0, first, dtype=np.int64), 1)
    ends = np.add.reduceat(rows.end - since, first) // count + launched
    end = np.where(is_symmetric, ends, np.maximum.reduceat(rows.end, first))
    begun = np.maximum(arrived, np.maximum.reduceat(rows.begin, first))
    return MatchedCollectives(
        step=np.maximum.reduceat(rows.step, first),
        family=family,
        is_whole=meetings.is_whole,
        skew=arrived - launched,
        waiting=np.add.reduceat(early, first) // waited,
        queue=np.add.reduceat(rows.begin - rows.launch, first) // count,
        transfer=np.maximum(end - begun, 0),
        last=meetings.last,
    )


def _families(meetings: Meetings, families: Sequence[Family]) -> Ints:
    """Return the family of each meeting: its rank's who puts in most, of a message the sender's."""
    n = len(families)
    weight = np.array([2 * f.bytes + (f.kind != "recv") for f in families], np.int64)
    of_row = meetings.rows.family
    greatest = np.maximum.reduceat(weight[of_row] * n + (n - 1 - of_row), meetings.first)
    return n - 1 - greatest % n


class CollectiveTable:
    """Collectives of the steps that were explained last."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._met: MatchedCollectives | None = None
        self.rows: tuple[CollectiveRow, ...] = ()
        self.row_of: dict[int, int] = {}  # a family's row

    def add(
        self, steps: Sequence[int], news: MatchedCollectives, families: Sequence[Family]
    ) -> None:
        """Take the collectives of steps that follow on those known; work out the rows again."""
        self._steps = [*self._steps, *steps][-RECENT:]
        known = news if self._met is None else MatchedCollectives.concatenate([self._met, news])
        while len(self._steps) > 1 and np.sum(known.step >= self._steps[0]) > MOST_MEETINGS:
            self._steps = self._steps[len(self._steps) // 2 :]
        self._met = known.at(known.step >= self._steps[0])
        self.rows, self.row_of = _rows(self._met, families, len(self._steps))

    def behind(self, step: int, families: Sequence[Family]) -> tuple[CollectiveRow, ...]:
        """Return the rows without the steps up to this one."""
        steps = [one for one in self._steps if one > step]
        if self._met is None or not steps:
            return ()
        return _rows(self._met.at(self._met.step > step), families, len(steps))[0]


def _rows(
    met: MatchedCollectives, families: Sequence[Family], steps: int
) -> tuple[tuple[CollectiveRow, ...], dict[int, int]]:
    """Return the rows of so many steps, and a family's row."""
    present, place = np.unique(met.family, return_inverse=True)
    count = np.bincount(place, minlength=len(present))
    whole, at = met.at(met.is_whole), place[met.is_whole]
    seen = np.bincount(at, minlength=len(present))
    skew, waiting, queue, transfer = (
        np.bincount(at, weights=times, minlength=len(present)) / np.maximum(seen, 1) * _MS
        for times in (whole.skew, whole.waiting, whole.queue, whole.transfer)
    )
    n = int(whole.last.max(initial=0)) + 1
    lasts = np.bincount(at * n + whole.last, minlength=len(present) * n).reshape(-1, n)
    chosen = np.sort(np.argsort(-(count * (waiting + transfer)), kind="stable")[:MOST_ROWS])
    row_of = {int(present[i]): row for row, i in enumerate(chosen)}
    rows = []
    for i in chosen:
        family = families[present[i]]
        times = None
        if seen[i]:
            times = (float(skew[i]), float(waiting[i]), float(queue[i]), float(transfer[i]))
        last = int(lasts[i].argmax())
        share = (last, float(lasts[i, last] / seen[i])) if seen[i] else None
        rows.append(_row(family, float(count[i]) / steps, times, share))
    return tuple(rows), row_of


def _row(
    family: Family,
    count: float,
    times: tuple[float, float, float, float] | None,
    last: tuple[int, float] | None,
) -> CollectiveRow:
    skew, waiting, queue, transfer = times or (None, None, None, None)
    algbw = busbw = None
    if family.bytes and transfer:
        moved = algorithm_bytes(family.kind, family.bytes, len(family.ranks))
        algbw = moved / transfer * 1e3
        busbw = algbw * bus_factor(family.kind, len(family.ranks))
    return CollectiveRow(
        kind=family.kind,
        title=family.title,
        ranks=family.ranks,
        line=family.line,
        dtype=family.dtype,
        bytes=family.bytes,
        count=count,
        skew_ms=skew,
        waiting_ms=waiting,
        queue_ms=queue,
        transfer_ms=transfer,
        last=last,
        algbw=algbw,
        busbw=busbw,
    )
