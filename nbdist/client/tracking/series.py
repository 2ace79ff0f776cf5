"""Turn records of many ranks into the points of one MLflow run. Pure: records in, points out.

Two kinds of series, named as research on MLflow's UI found readable:

- *flat*, one for the whole run, to sort and compare by (`flat`; once a second
  `metrics.recent`), and what `nbdist.log` was given, under its own name (mean over the ranks that
  logged it);
- *by rank*: `rank_loss/00`, `rank_comm_ms/00`, `rank_step_ms/00`, `rank_data_ms/00` and
  `rank_wait_ms/00`; above 16 ranks the charts and the server would drown, and `/min`, `/median`,
  `/max` and `/argmax` (a rank) take their place.

Waiting and skew come from `CellAnalysis`, for some of the steps and a little later.

What devices do is by rank alone: `rank_device_pct/00` and others, of 16 ranks at most, seconds
apart at first and later a five-hundredth of the time since.

Points cost: MLflow takes a tenth of a millisecond for each, and charts show a thousand. So of more
than `MOST_LOSSES` steps a second about so many have their loss, and of those that are measured (see
`wire.Record`) about `MOST_TIMINGS` all the rest. What `nbdist.log` was given has all of its own.

A flat point needs every rank's record of its step. It is made when the last one arrives, or when
`LAG_S` have passed since the first came, or at the end. That is counted by the notebook's monotonic
clock: ranks' wall clocks differ, and jump. A value that comes later still enters its rank's series.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nbdist.client.metrics.analysis.values import ExplainedStep
from nbdist.client.tracking.flat import (
    MEASURED_BY_RANK,
    flat_values,
    mean,
    of_device,
    of_rank,
    spread,
)
from nbdist.client.tracking.names import metric_name, rank_metric
from nbdist.shared.wire import Record, is_measured

MOST_RANK_SERIES = 16
MOST_LOSSES = 100  # a second, as the one below
MOST_TIMINGS = 4
FIRST_TIMINGS = 20  # of the first steps so many have theirs, however short they are
_LOSSES = frozenset({"loss", "grad_share", "expert_tokens", "expert_even"})
LAG_S = 5.0
DEVICES_EVERY_S, DEVICES_SHARE = 2.0, 1 / 500  # of the time since the first
_MOST_PENDING = 4096  # groups that wait for a rank, and groups remembered as done

# What was logged ("" for a step row), step, how manieth this step (of a step row 1 is what was left
# out beside its loss).
Group = tuple[str, int, int]


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


class _KeptSteps:
    """Which steps have points: one in a stride that doubles while that is too many a second.

    It is the same for all ranks: a new one holds from a step on that no rank has reached yet.
    """

    def __init__(self, most_a_second: float, at_first: int) -> None:
        self._most = most_a_second
        self._enough = at_first  # to tell the rate by
        self._strides = [(0, 1)]  # from which step on
        self._newest = 0
        self._since: Record | None = None  # of the rank whose clock tells the rate
        self._count = 0

    def is_one(self, step: int) -> bool:
        """Return whether a step is one of those that have points."""
        begin, stride = self._strides[-1]
        if step < begin:
            stride = next(stride for begin, stride in reversed(self._strides) if step >= begin)
        return step % stride == 0

    def keeps(self, record: Record) -> bool:
        """Return whether the step of a record is one of those, and count it."""
        self._newest = max(self._newest, record.step)
        if not self.is_one(record.step):
            return False
        if self._since is None:
            self._since = record
        elif record.rank == self._since.rank:
            self._note(record, self._since)
        return True

    def _note(self, record: Record, since: Record) -> None:
        self._count += 1
        if self._count >= self._enough:
            if self._count * 1e9 > 1.5 * self._most * (record.time_ns - since.time_ns):
                self._strides.append((self._newest + 1, 2 * self._strides[-1][1]))
            self._since, self._count, self._enough = record, 0, round(2 * self._most)


class RunSeries:
    """The points of one run, made from its records as they come, in any order of ranks.

    Args:
        ranks: The ranks of the cell.
        first_step: Added to every step; the last step of the run that this one continues.
    """

    def __init__(self, ranks: Sequence[int], first_step: int = 0) -> None:
        self._ranks = frozenset(ranks)
        self._first_step = first_step
        self._pending: dict[Group, _Pending] = {}
        self._done: dict[Group, None] = {}  # in the order they were closed
        self._now_s = 0.0
        self._losses = _KeptSteps(MOST_LOSSES, 2 * MOST_LOSSES)
        self._timings = _KeptSteps(MOST_TIMINGS, FIRST_TIMINGS)
        self._left_out: dict[int, Record] = {}  # each rank's newest step without points
        self._device_points: dict[int, tuple[int, int]] = {}  # each rank's first and newest, ns
        self._device_left_out: dict[int, Record] = {}  # each rank's newest without a point
        self._times_logged: dict[tuple[int, str], tuple[int, int]] = {}  # newest step, how often
        self._user_keys: set[str] = set()
        self._newest_loss: dict[int, float] = {}  # by rank
        self._losses_before: dict[float, dict[int, float]] = {}  # at the begin of a training
        self.keys: set[str] = set()  # all metrics that have points
        self.last: dict[str, float] = {}
        self._last_ns = self._newest_ns = self._recent_ns = 0
        self.last_step = first_step
        self.steps = 0

    @property
    def user_keys(self) -> tuple[str, ...]:
        """Names that `nbdist.log` was given, sorted."""
        return tuple(sorted(self._user_keys))

    @property
    def losses_before(self) -> list[float]:
        """The last mean loss of each training in the cell but the newest, in order."""
        return [mean(of.values()) for _, of in sorted(self._losses_before.items()) if of]

    def recent(self, values: Mapping[str, float]) -> list[Point]:
        """Return the point of what recent steps are like by now (`metrics.recent`), if it is new.

        What the user logs by one of its names is what they mean by it.
        """
        fresh = {name: v for name, v in values.items() if name not in self._user_keys}
        if all(self.last.get(name) == value for name, value in fresh.items()):
            return []
        self.last |= fresh
        # Of two at one step MLflow's newest is the one of the later time.
        self._recent_ns = max(self._newest_ns, self._recent_ns + 1_000_000)
        return [self._point(self._recent_ns, self.steps, fresh)]

    def add(self, records: Iterable[Record], now_s: float = 0.0) -> list[Point]:
        """Take records in, at `time.monotonic()`; return the points that are now certain."""
        self._now_s = now_s
        points: list[Point] = []
        for record in records:
            if record.kind == "step":
                points += self._add_step(record)
            elif record.kind == "log":
                points += self._add_log(record)
            elif record.kind == "device":
                points += self._add_device(record)
        return points + self._close_old()

    def add_explained(self, steps: Iterable[ExplainedStep]) -> list[Point]:
        """Take in what `CellAnalysis` found of some steps; return its points.

        Each step comes once, and has the clock of the newest point before it, for it carries none.
        """
        points = []
        for explained in steps:
            if not self._timings.is_one(explained.step):
                continue
            skew_ms = explained.skew_ms
            values = {} if skew_ms is None else {"skew_ms": skew_ms}
            if len(self._ranks) > MOST_RANK_SERIES:
                values |= spread("wait_ms", explained.waiting_ms)
            else:
                for rank, waiting_ms in explained.waiting_ms.items():
                    values[rank_metric("wait_ms", rank)] = waiting_ms
            for name in self._user_keys & values.keys():
                del values[name]
            if values:
                self.last |= values
                points.append(self._point(self._last_ns, explained.step, values))
        return points

    def finish(self) -> list[Point]:
        """Return the points still waiting for a rank; no record comes any more."""
        points = []
        for record in self._left_out.values():
            if record.step == self.steps:  # the last one always has its points
                points += self._step_points(record, has_losses=self._losses.is_one(record.step))
        points += [self._device_point(record) for record in self._device_left_out.values()]
        for group in list(self._pending):
            points.append(self._close(group))
        return points

    def _add_step(self, record: Record) -> list[Point]:
        self.steps = max(self.steps, record.step)
        if begun := record.values.get("training_began"):
            before = self._losses_before.setdefault(begun, {})
            if record.rank in self._newest_loss:
                before[record.rank] = self._newest_loss[record.rank]
        if (loss := record.values.get("loss")) is not None and "loss" not in self._user_keys:
            self._newest_loss[record.rank] = loss
        self._newest_ns = max(self._newest_ns, record.time_ns)
        is_all_there_is = is_measured(record.values) or "step_s" not in record.values
        if is_all_there_is and self._timings.keeps(record):
            return self._step_points(record)
        self._left_out[record.rank] = record
        if self._losses.keeps(record):
            losses = {key: v for key, v in record.values.items() if key in _LOSSES}
            return self._join(("", record.step, 0), record, losses) if losses else []
        return []

    def _step_points(self, record: Record, *, has_losses: bool = False) -> list[Point]:
        """Return all points of a step, but for the flat ones where it has these already."""
        points = []
        if len(self._ranks) <= MOST_RANK_SERIES:
            own = {
                rank_metric(quantity, record.rank): value
                for quantity, value in of_rank(record.values).items()
            }
            if own:
                points.append(self._point(record.time_ns, record.step, own))
            if has_losses:
                return points
        return points + self._join(("", record.step, int(has_losses)), record, record.values)

    def _add_log(self, record: Record) -> list[Point]:
        points = []
        for name, value in record.values.items():
            key = metric_name(name)
            self._user_keys.add(key)
            if key == "loss":
                self._newest_loss[record.rank] = value
            step, times = self._times_logged.get((record.rank, key), (record.step, 0))
            nth = times if step == record.step else 0
            self._times_logged[record.rank, key] = (record.step, nth + 1)
            points += self._join((key, record.step, nth), record, {key: value})
        return points

    def _add_device(self, record: Record) -> list[Point]:
        if len(self._ranks) > MOST_RANK_SERIES:
            return []
        first_ns, newest_ns = self._device_points.get(record.rank, (record.time_ns, 0))
        every_ns = max(1e9 * DEVICES_EVERY_S, DEVICES_SHARE * (record.time_ns - first_ns))
        if record.time_ns - newest_ns < every_ns:
            self._device_left_out[record.rank] = record
            return []
        self._device_left_out.pop(record.rank, None)
        self._device_points[record.rank] = first_ns, record.time_ns
        return [self._device_point(record)]

    def _device_point(self, record: Record) -> Point:
        values = {
            rank_metric(quantity, record.rank): value
            for quantity, value in of_device(record.values).items()
        }
        return self._point(record.time_ns, record.step, values)

    def _join(self, group: Group, record: Record, values: dict[str, float]) -> list[Point]:
        if group in self._done:
            return []  # it came too late for the mean
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
        self._done[group] = None
        if len(self._done) > _MOST_PENDING:
            del self._done[next(iter(self._done))]
        key, step, nth = group
        if key:
            values = {key: mean(v[key] for v in pending.by_rank.values())}
            # Without an optimizer all steps are 0: count the calls instead, or the curve
            # would be one vertical line.
            step = step or nth
        else:
            values = {} if nth else flat_values(pending.by_rank)
            if len(self._ranks) > MOST_RANK_SERIES:
                own = {rank: of_rank(values) for rank, values in pending.by_rank.items()}
                for quantity in MEASURED_BY_RANK:
                    known = {r: its[quantity] for r, its in own.items() if quantity in its}
                    values |= spread(quantity, known)
            for name in self._user_keys & values.keys():
                del values[name]  # what the user logs by that name is what they mean by it
        self.last |= values
        self._last_ns = max(self._last_ns, pending.last_ns)
        return self._point(pending.last_ns, step, values)

    def _point(self, time_ns: int, step: int, values: dict[str, float]) -> Point:
        step += self._first_step
        self.last_step = max(self.last_step, step)
        self.keys |= values.keys()
        return Point(time_ns // 1_000_000, step, values)
