"""Receive one cell's records from the ranks and remember them.

Live by push, complete by pull: batches arrive while the cell runs, and at its end `gaps` says
which records a rank made that have not come, so that only these are asked for again. A record
that arrives twice counts once.

Threads: `receive` may be called on any thread (ipyparallel's IO thread while the cell runs, the
main one when a gap is filled); one lock puts the calls in order. Everything that reads takes no
lock and copies no history, so that the board's thread never makes the IO thread wait: history
grows only at its end, or is replaced as a whole.

Series are by steps, those of devices by the seconds of the rank's wall clock.

Bounds: a series keeps `MAX_POINTS` points, a device's `MAX_DEVICE_POINTS`; then every four
neighbours become two, their least and their greatest, so that spikes and trends stay visible at
half the memory. `between` finds all points of series over steps, on the disk (`detail`).
Subscribers see every record. At most `MAX_KEYS` keys have a series.
"""

import heapq
import logging
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter, le
from typing import Any

from nbdist.client.metrics.changes import Change, changes_of
from nbdist.client.metrics.detail import NOT_KEPT, Detail, DetailLine, Part, lost_part
from nbdist.shared.wire import DEVICE_KEYS, EMULATED, RUN_KINDS, STAGES, STEP_KEYS, Batch, Record

MAX_POINTS = 20_000  # a plot is about 1000 pixels wide; 16 bytes a point
MAX_DEVICE_POINTS = 2000  # they come each second, whatever a step takes
MAX_KEYS = 256
IDLE_S = 5.0  # a training that is quiet for longer is said to be
_OURS = STEP_KEYS | DEVICE_KEYS

_log = logging.getLogger("nbdist.telemetry")


@dataclass(frozen=True, slots=True)
class Series:
    """One key's history on one rank, as it was when asked: the first `n` points of two arrays.

    The arrays are shared with the writer, who appends behind `n`: read `steps[:n]`, and never
    hold a memoryview or `numpy.frombuffer` of the arrays themselves, for it makes appending fail
    (of a slice it is fine). As long as `generation` stays the same, a reader that remembers its
    last `n` needs only the points from there on; when it changes, history was rewritten.

    `seen` and `total` count and sum every value ever received, also those thinned out.
    """

    steps: "array[float]"
    values: "array[float]"
    n: int
    generation: int
    seen: int
    total: float


@dataclass(frozen=True, slots=True)
class CellInfo:
    """One `%%distributed` cell, as board and tracker need to know it.

    `number` is that of the notebook's prompt, as errors say it; in a script the session's count.
    `continues` names the run (its folder in the spool) of a failed attempt that this one repeats,
    `study` the run under which this one is nested. With `attached` it is the run that `continues`,
    which another kernel had begun.
    """

    number: int
    source: str
    ranks: tuple[int, ...]
    world_size: int
    backend: str
    devices: tuple[str, ...]
    run_name: str | None = None
    resume: bool = False
    continues: str | None = None
    attached: bool = False
    study: str | None = None
    track: bool = True
    params: dict[str, Any] = field(default_factory=dict)


def series_key(kind: str, key: str) -> str:
    """Return the name of the series that a record's value belongs to.

    A user's own `nbdist.log(loss=...)` must not mix with the loss that the hooks saw: it is
    `log.loss`. Names that we do not use are kept as they are.
    """
    return f"log.{key}" if kind == "log" and key in _OURS else key


class Telemetry:
    """All records of one cell, of all ranks.

    Attributes:
        latest: Rank to its newest values, `step` among them. A rank's dict is replaced, never
            changed, so it may be read from any thread.
        facts: Rank to the facts it has reported, replaced likewise.
        stages: Rank to steps, to when its stages ran micro-batches in them.
        emulated: Rank to what its virtual device owed in the cell, once that has ended.
        experts: Rank to the step and the values of its newest row of experts.
        first_record: Set when the first step or logged value has arrived: from now on the cell is a
            run. Collectives and links alone, as of a cell with a `dist.barrier()`, make none.
        count: Records received, each counted once.
        trained_s: When the newest step or logged value came, by `time.monotonic()`; 0 before one.
        ignored_keys: Keys beyond `MAX_KEYS`, which have no series.
        detail: Where points lie that were thinned; None where they do nowhere.
    """

    def __init__(
        self, begin: Mapping[int, int] | None = None, detail: Detail | None = None
    ) -> None:
        """Start empty.

        Args:
            begin: Rank to the first `seq` that can belong to this cell, where known (the
                `next_seq` of the rank's last CellEnd); what is older is ignored.
            detail: Keeps points that are thinned.
        """
        self.detail = detail
        self.latest: dict[int, dict[str, float]] = {}
        self.facts: dict[int, dict[str, str]] = {}
        self.emulated: dict[int, dict[str, float]] = {}
        self.stages: dict[int, dict[int, dict[str, float]]] = {}
        self.experts: dict[int, tuple[int, dict[str, float]]] = {}
        self.first_record = threading.Event()
        self.count = 0
        self.trained_s = 0.0
        self.ignored_keys: set[str] = set()
        self._begin = dict(begin or {})
        self._received: dict[int, _Ranges] = {}
        self._series: dict[str, dict[int, History]] = {}
        self._subscribers: list[Callable[[list[Record]], None]] = []
        self._lock = threading.RLock()

    def receive(self, batch: Batch) -> None:
        """Take in what is new in `batch` and tell the subscribers; what is known is ignored."""
        with self._lock:
            if batch.facts:
                self.facts[batch.rank] = {**self.facts.get(batch.rank, {}), **batch.facts}
            received = self._received.setdefault(batch.rank, _Ranges())
            begin, before = self._begin.get(batch.rank, 0), received.end
            fresh = list(batch.records)
            if fresh and fresh[0].seq >= max(begin, before):  # as nearly always
                received.extend(fresh[0].seq, fresh[-1].seq + 1)
            else:
                fresh = [r for r in fresh if r.seq >= begin and r.seq not in received]
                for record in fresh:
                    received.add(record.seq)
            if not fresh:
                return
            is_late = fresh[0].seq < before
            self._remember(batch.rank, fresh, is_late)
            self.count += len(fresh)
            if any(record.kind in RUN_KINDS for record in fresh):
                self.trained_s = time.monotonic()
                self.first_record.set()
            self._tell(fresh)

    def gaps(self, bounds: Mapping[int, tuple[int, int]]) -> dict[int, list[tuple[int, int]]]:
        """Return which records are missing: rank to ranges `(first, next)`, if there are any.

        Args:
            bounds: Rank to its CellEnd's `(first_seq, next_seq)`.
        """
        with self._lock:
            found = {
                rank: self._received.get(rank, _Ranges()).missing(first, end)
                for rank, (first, end) in bounds.items()
            }
        return {rank: ranges for rank, ranges in found.items() if ranges}

    def subscribe(self, callback: Callable[[list[Record]], None]) -> None:
        """Call `callback` with every new record, once, from now on.

        It gets lists of one rank's records, in the order of `seq` but for those that fill a gap.
        It runs on the thread that receives and must not block. If it raises, that is logged and
        it is never called again.
        """
        with self._lock:
            self._subscribers.append(callback)

    @property
    def machine(self) -> str:
        """The device and link that ranks stand for; empty where they are this machine's."""
        return next((of[EMULATED] for of in list(self.facts.values()) if EMULATED in of), "")

    @property
    def changes(self) -> tuple[Change, ...]:
        """What was changed by hand so far, in order; any thread."""
        return changes_of(self.facts)

    def keys(self) -> list[str]:
        """Return the keys that have a series, in the order in which they appeared."""
        return list(self._series)

    def series(self, key: str) -> dict[int, Series]:
        """Return the history of `key`, rank to Series; ranks that never sent it are left out.

        Costs microseconds whatever the length; may be called from any thread at any rate.
        """
        histories = self._series.get(key, {})
        return {rank: history.snapshot() for rank, history in sorted(histories.copy().items())}

    def between(self, key: str, rank: int, low: float, high: float, enough: int) -> Part:
        """Return a part of a series, see `History.between`. Any thread; may read the disk."""
        return self._series[key][rank].between(low, high, enough)

    def first_values(self, key: str) -> dict[int, float]:
        """Return the first value of `key` on each rank, unless thinning may have dropped it."""
        found = self.series(key)
        return {
            rank: series.values[0]
            for rank, series in found.items()
            if series.n and series.n == series.seen
        }

    def _remember(self, rank: int, records: list[Record], is_late: bool) -> None:
        latest: dict[str, float] = {}
        # Each series once: measured steps and others take turns, and so do their keys.
        columns: dict[str, tuple[list[float], list[float]]] = {}
        for (kind, keys), group in groupby(records, lambda r: (r.kind, tuple(r.values))):
            rows = list(group)
            if kind == "experts":
                told = rows[-1].step, rows[-1].values
                self.experts[rank] = max(told, self.experts.get(rank, told), key=itemgetter(0))
            if kind == STAGES:
                self.stages[rank] = {rows[-1].step: rows[-1].values, **self.stages.get(rank, {})}
            if kind == EMULATED:
                self.emulated[rank] = rows[-1].values
            if kind not in RUN_KINDS and kind != "device":
                continue
            if kind == "device":
                steps: Sequence[float] = [record.time_ns / 1e9 for record in rows]
            else:
                steps = [record.step for record in rows]
            names = [series_key(kind, key) for key in keys]
            by_key = zip(*(record.values.values() for record in rows), strict=True)
            for name, values in zip(names, by_key, strict=True):
                column = columns.setdefault(name, ([], []))
                column[0].extend(steps)
                column[1].extend(values)
            latest |= zip(names, rows[-1].values.values(), strict=True)
            if kind != "device" and not is_late:
                latest["step"] = steps[-1]
        for name, column in columns.items():
            if (history := self._history(name, rank)) is not None:
                history.extend(*column)
        known = self.latest.get(rank, {})
        # What fills a gap is older than what is shown.
        self.latest[rank] = {**latest, **known} if is_late else {**known, **latest}

    def _history(self, key: str, rank: int) -> "History | None":
        if key not in self._series:
            if len(self._series) >= MAX_KEYS:
                self.ignored_keys.add(key)
                return None
            self._series[key] = {}
        of_ranks = self._series[key]
        if rank not in of_ranks:
            is_device = key in DEVICE_KEYS
            of_ranks[rank] = (
                History(MAX_DEVICE_POINTS) if is_device else History(detail=self.detail)
            )
        return of_ranks[rank]

    def _tell(self, records: list[Record]) -> None:
        for callback in list(self._subscribers):
            try:
                callback(records)
            except Exception:
                self._subscribers.remove(callback)
                _log.exception("A subscriber of records failed and was removed")


class History:
    """One key on one rank, at most so many points. One writer; any number of readers."""

    def __init__(self, most: int = MAX_POINTS, detail: Detail | None = None) -> None:
        """Begin empty.

        Args:
            most: Points in memory.
            detail: Keeps the points that are thinned.
        """
        self._most = most
        self._detail: DetailLine | None = detail.line() if detail is not None else None
        # One tuple, replaced as a whole: a reader sees arrays that belong together. Of the points
        # the first so many have been thinned, of so many that were handed to `detail`.
        self._data: tuple[array[float], array[float], int, int, int]
        self._data = array("d"), array("d"), 0, 0, 0
        self._seen = 0
        self._total = 0.0

    def extend(self, new_steps: Sequence[float], new_values: Sequence[float]) -> None:
        """Add points; those that belong between older ones are put there."""
        steps, values, generation, thinned, left = self._data
        self._seen += len(new_values)
        total = sum(new_values)
        if total != total:  # a NaN loss must not hide the mean of the rest
            total = sum(value for value in new_values if value == value)
        self._total += total
        is_in_order = all(map(le, new_steps, new_steps[1:]))
        if is_in_order and (not steps or new_steps[0] >= steps[-1]):
            steps.extend(new_steps)
            values.extend(new_values)  # last: readers go by its length
        else:
            late = _sorted(new_steps, new_values)
            if thinned and (count := bisect_left(late[0], steps[thinned - 1])):
                left = self._keep(late[0][:count], late[1][:count])
                thinned += count
            steps, values = _merged(steps, values, *late)
            generation += 1
        while len(values) >= self._most:
            left = self._keep(steps[thinned:], values[thinned:])
            steps, values = thin(steps, values)
            generation, thinned = generation + 1, len(values)
        self._data = steps, values, generation, thinned, left

    def _keep(self, steps: "array[float]", values: "array[float]") -> int:
        """Keep points that are thinned; return how many were handed over so far."""
        return 0 if self._detail is None else self._detail.put(steps, values)

    def snapshot(self) -> Series:
        """Return what there is now."""
        steps, values, generation, *_ = self._data
        return Series(steps, values, len(values), generation, self._seen, self._total)

    def between(self, low: float, high: float, enough: int) -> Part:
        """Return the points from one step to another: all of them, where they are kept.

        More than `enough` are those in memory, some of which thinning has left.
        """
        steps, values, _, thinned, left = self._data
        n = len(values)
        first = bisect_left(steps, low, hi=n)
        until = bisect_right(steps, high, lo=first, hi=n)
        if first >= thinned or until - first > enough:
            return Part(steps[first:until], values[first:until])
        thinned = min(thinned, until)
        finer = lost_part(NOT_KEPT)
        if self._detail is not None:
            finer = self._detail.between(low, high, left)
        old = bisect_right(steps, finer.lost_until, lo=first, hi=thinned)  # the best there is
        return replace(
            finer,
            steps=steps[first:old] + finer.steps + steps[thinned:until],
            values=values[first:old] + finer.values + values[thinned:until],
        )


def _sorted(
    steps: Sequence[float], values: Sequence[float]
) -> tuple["array[float]", "array[float]"]:
    points = sorted(zip(steps, values, strict=True), key=itemgetter(0))
    return array("d", [step for step, _ in points]), array("d", [value for _, value in points])


def _merged(
    steps: "array[float]",
    values: "array[float]",
    late_steps: "array[float]",
    late_values: "array[float]",
) -> tuple["array[float]", "array[float]"]:
    """Return copies with late points put in, each after all points of its step."""
    first = bisect_right(steps, late_steps[0])
    rest = zip(steps[first:], values[first:], strict=True)
    late = zip(late_steps, late_values, strict=True)
    merged = list(heapq.merge(rest, late, key=itemgetter(0)))  # of equal ones those of `rest` first
    return (
        steps[:first] + array("d", [step for step, _ in merged]),
        values[:first] + array("d", [value for _, value in merged]),
    )


def thin(steps: "array[float]", values: "array[float]") -> tuple["array[float]", "array[float]"]:
    """Return about half of the points: of every four neighbours the least and the greatest.

    A value that is not a number takes the place of one of them, and the last point stays.
    """
    import numpy as np  # here: a notebook that only starts does not wait for it

    cut = len(values) - (len(values) % 4 or 4)
    groups = np.array(values[:cut]).reshape(-1, 4)
    is_odd = np.isnan(groups)
    least = np.where(is_odd.any(1), is_odd.argmax(1), groups.argmin(1))
    greatest = np.where(is_odd, -np.inf, groups).argmax(1)
    starts = np.arange(0, cut, 4)
    kept = np.unique(np.concatenate((starts + least, starts + greatest)))

    def chosen(numbers: "array[float]") -> "array[float]":
        return array("d", np.array(numbers[:cut])[kept].tobytes()) + numbers[cut:]

    return chosen(steps), chosen(values)


class _Ranges:
    """A set of whole numbers that come mostly in order, as disjoint ranges `[first, next)`."""

    def __init__(self) -> None:
        self._ranges: list[list[int]] = []

    @property
    def end(self) -> int:
        """One more than the greatest number; 0 when empty."""
        return self._ranges[-1][1] if self._ranges else 0

    def __contains__(self, number: int) -> bool:
        return any(first <= number < end for first, end in reversed(self._ranges))

    def extend(self, first: int, end: int) -> None:
        """Put in numbers behind all that are there."""
        if self._ranges and self._ranges[-1][1] == first:
            self._ranges[-1][1] = end
        else:
            self._ranges.append([first, end])

    def add(self, number: int) -> None:
        """Put in a number that is not there yet."""
        at = len(self._ranges)
        while at and self._ranges[at - 1][0] > number:
            at -= 1
        if at and self._ranges[at - 1][1] == number:
            self._ranges[at - 1][1] = number + 1
        else:
            self._ranges.insert(at, [number, number + 1])
            at += 1
        if at < len(self._ranges) and self._ranges[at][0] == number + 1:
            self._ranges[at - 1][1] = self._ranges.pop(at)[1]

    def missing(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of `[first, end)` that are not in the set."""
        holes = []
        for low, high in self._ranges:
            if first >= end:
                break
            if low > first:
                holes.append((first, min(low, end)))
            first = max(first, high)
        if first < end:
            holes.append((first, end))
        return holes
