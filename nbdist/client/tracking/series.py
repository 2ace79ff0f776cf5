"""Turn records of many ranks into the points of one MLflow run. Pure: records in, points out.

Two kinds of series, named as research on MLflow's UI found readable:

- *flat*, one for the whole run, to sort and compare by: `loss` (mean over ranks), `step_s` (mean),
  `samples_per_s` (all ranks), `comm_pct` (exposed communication, share of the step), `skew_ms`
  (how much longer the slowest rank worked than the fastest, waiting not counted), and what
  `nbdist.log` was given, under its own name (mean over the ranks that logged it);
- *by rank*: `rank_loss/00`, `rank_comm_s/00`, `rank_step_s/00`; above 16 ranks the charts and
  the server would drown, and `/min`, `/median`, `/max` and `/argmax` (a rank) take their place.

A flat point needs every rank's record of its step. It is made when the last one arrives, or when
`LAG_S` have passed since the first came, or at the end. That is counted by the notebook's monotonic
clock: ranks' wall clocks differ, and jump. A value that comes later still enters its rank's series.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nbdist.client.tracking.names import metric_name, rank_metric
from nbdist.wire import Record

MOST_RANK_SERIES = 16
BY_RANK = ("loss", "comm_s", "step_s")
TIMINGS = ("step_s", "samples_per_s", "comm_pct", "skew_ms")
RECENT = 50
LAG_S = 5.0
_MOST_PENDING = 4096  # groups that wait for a rank, and groups remembered as done

Group = tuple[str, int, int]  # what was logged ("" for a step row), step, how manieth this step


@dataclass(frozen=True, slots=True)
class Point:
    """Values of one moment. `time_ms` is a rank's own wall clock, `step` its optimizer step."""

    time_ms: int
    step: int
    values: dict[str, float]


@dataclass(slots=True)
class _Pending:
    since_s: float
    last_ns: int
    by_rank: dict[int, dict[str, float]] = field(default_factory=dict)


class Series:
    """The points of one run, made from its records as they come, in any order of ranks.

    Args:
        ranks: The ranks of the cell.
        first_step: Added to every step; the last step of the run that this one continues.
    """

    def __init__(self, ranks: Sequence[int], first_step: int = 0) -> None:
        self._ranks = frozenset(ranks)
        self._first_step = first_step
        self._pending: dict[Group, _Pending] = {}
        self._done: set[Group] = set()
        self._done_order: deque[Group] = deque()
        self._now_s = 0.0
        self._times_logged: dict[tuple[int, str], tuple[int, int]] = {}  # newest step, how often
        self._user_keys: set[str] = set()
        self.last: dict[str, float] = {}
        self._recent: dict[str, deque[float]] = {key: deque(maxlen=RECENT) for key in TIMINGS}
        self.last_step = first_step
        self.steps = 0
        self.late = 0

    @property
    def user_keys(self) -> tuple[str, ...]:
        """Names that `nbdist.log` was given, sorted."""
        return tuple(sorted(self._user_keys))

    def summary(self) -> dict[str, float]:
        """Return what stands in the table of runs: the last values, of timings the usual ones.

        One step's time says little; the median of the last `RECENT` compares from run to run.
        """
        usual = {key: statistics.median(recent) for key, recent in self._recent.items() if recent}
        return {**self.last, **usual}

    def add(self, records: Iterable[Record], now_s: float = 0.0) -> list[Point]:
        """Take records in, at `time.monotonic()`; return the points that are now certain."""
        self._now_s = now_s
        points: list[Point] = []
        for record in records:
            if record.kind == "step":
                points += self._add_step(record)
            elif record.kind == "log":
                points += self._add_log(record)
        points += self._close_old()
        return points

    def finish(self) -> list[Point]:
        """Return the points still waiting for a rank; no record comes any more."""
        points = []
        for group in list(self._pending):
            points.append(self._close(group))
        return points

    def _add_step(self, record: Record) -> list[Point]:
        self.steps = max(self.steps, record.step)
        points = []
        if len(self._ranks) <= MOST_RANK_SERIES:
            own = {
                rank_metric(quantity, record.rank): record.values[quantity]
                for quantity in BY_RANK
                if quantity in record.values
            }
            if own:
                points.append(self._point(record.time_ns, record.step, own))
        return points + self._join(("", record.step, 0), record, record.values)

    def _add_log(self, record: Record) -> list[Point]:
        points = []
        for name, value in record.values.items():
            key = metric_name(name)
            self._user_keys.add(key)
            step, times = self._times_logged.get((record.rank, key), (record.step, 0))
            nth = times if step == record.step else 0
            self._times_logged[record.rank, key] = (record.step, nth + 1)
            points += self._join((key, record.step, nth), record, {key: value})
        return points

    def _join(self, group: Group, record: Record, values: dict[str, float]) -> list[Point]:
        if group in self._done:
            self.late += 1
            return []
        pending = self._pending.setdefault(group, _Pending(self._now_s, record.time_ns))
        pending.last_ns = max(pending.last_ns, record.time_ns)
        pending.by_rank[record.rank] = values
        if pending.by_rank.keys() >= self._ranks:
            return [self._close(group)]
        return []

    def _close_old(self) -> list[Point]:
        points = []
        # Groups stand in the order they began: the first young one ends the search.
        while self._pending:
            group = next(iter(self._pending))
            old = self._now_s - self._pending[group].since_s > LAG_S
            if not old and len(self._pending) <= _MOST_PENDING:
                break
            points.append(self._close(group))
        return points

    def _close(self, group: Group) -> Point:
        pending = self._pending.pop(group)
        self._done.add(group)
        self._done_order.append(group)
        if len(self._done_order) > _MOST_PENDING:
            self._done.discard(self._done_order.popleft())
        key, step, nth = group
        if key:
            values = {key: _mean(v[key] for v in pending.by_rank.values())}
            # Without an optimizer all steps are 0: count the calls instead, or the curve
            # would be one vertical line.
            step = step or nth
        else:
            values = flat_values(pending.by_rank)
            if len(self._ranks) > MOST_RANK_SERIES:
                values |= spread_values(pending.by_rank)
            for name in self._user_keys & values.keys():
                del values[name]  # what the user logs by that name is what they mean by it
        self.last |= values
        for key, recent in self._recent.items():
            if key in values:
                recent.append(values[key])
        return self._point(pending.last_ns, step, values)

    def _point(self, time_ns: int, step: int, values: dict[str, float]) -> Point:
        step += self._first_step
        self.last_step = max(self.last_step, step)
        return Point(time_ns // 1_000_000, step, values)


def flat_values(by_rank: dict[int, dict[str, float]]) -> dict[str, float]:
    """Return the flat values of one step from each rank's own; what no rank measured is absent."""
    rows = list(by_rank.values())
    losses = _known(rows, "loss")
    step_s = _known(rows, "step_s")
    samples = _known(rows, "samples")
    timed = [r for r in rows if "step_s" in r and "comm_s" in r]
    values: dict[str, float] = {}
    if losses:
        values["loss"] = _mean(losses)
    if step_s:
        values["step_s"] = _mean(step_s)
    if samples and step_s and max(step_s) > 0:
        values["samples_per_s"] = sum(samples) / max(step_s)
    if timed and (whole := sum(r["step_s"] for r in timed)) > 0:
        values["comm_pct"] = 100 * sum(r["comm_s"] for r in timed) / whole
    if len(timed) > 1:
        worked = [r["step_s"] - r["comm_s"] for r in timed]
        values["skew_ms"] = 1000 * (max(worked) - min(worked))
    return values


def spread_values(by_rank: dict[int, dict[str, float]]) -> dict[str, float]:
    """Return least, median and greatest value of each quantity, and the rank of the greatest."""
    values: dict[str, float] = {}
    for quantity in BY_RANK:
        known = {r: v[quantity] for r, v in by_rank.items() if quantity in v}
        finite = {r: v for r, v in known.items() if not math.isnan(v)}
        # A rank whose loss is NaN is the one to look at.
        top = max(finite or known, key=lambda r: known[r]) if known else 0
        if len(finite) < len(known):
            top = min(known.keys() - finite.keys())
        if known:
            ordered = sorted(finite.values()) or [math.nan]
            values[f"rank_{quantity}/min"] = ordered[0]
            values[f"rank_{quantity}/median"] = statistics.median(ordered)
            values[f"rank_{quantity}/max"] = known[top]
            values[f"rank_{quantity}/argmax"] = float(top)
    return values


def _mean(values: Iterable[float]) -> float:
    # Not statistics.fmean: it raises when +inf meets -inf, and losses do explode.
    known = list(values)
    return sum(known) / len(known)


def _known(rows: Sequence[dict[str, float]], key: str) -> list[float]:
    return [row[key] for row in rows if key in row]
