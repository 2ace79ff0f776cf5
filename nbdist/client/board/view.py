"""Say what the board shows now, as plain values; draw nothing.

`look` reads a cell's telemetry into a `View`; figure.py and text.py show it. Times are in
milliseconds from here on, as people read them.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from nbdist.client.board.scales import Floats
from nbdist.wire import STEP_KEYS, CellInfo

RECENT = 50  # steps behind every "now": rates, shares, the split of a step
MOST_OWN = 2  # panels for numbers that the user logged
FEWEST_STEPS = 50  # before a rank is called slow


class Series(Protocol):
    """One number of one rank over the steps: the first `n` points of two growing arrays."""

    @property
    def steps(self) -> "array[float]":
        """Return the optimizer steps, not falling."""

    @property
    def values(self) -> "array[float]":
        """Return one value a step."""

    @property
    def n(self) -> int:
        """Return how many points there are; the arrays may have grown beyond."""


class Telemetry(Protocol):
    """What the board asks of `nbdist.client.telemetry.Telemetry`; any thread may ask."""

    @property
    def count(self) -> int:
        """Return how many records have arrived."""

    @property
    def latest(self) -> Mapping[int, Mapping[str, float]]:
        """Return each rank's newest value of each key."""

    def series(self, key: str) -> Mapping[int, Series]:
        """Return the history of one key, by rank."""


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """One rank's history of one number; `x` and `y` of one length, at least 1."""

    rank: int
    x: Floats
    y: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """One plot over the steps.

    `floor` is a value that must stay in sight, such as 0; `by` is what x counts: "step", or
    "record" where nothing steps.
    """

    key: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    floor: float | None = None
    by: str = "step"


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Where a recent step's time went: milliseconds, one entry a rank of `ranks`."""

    ranks: tuple[int, ...]
    compute_ms: Floats
    comm_ms: Floats
    data_ms: Floats


@dataclass(frozen=True, slots=True)
class Row:
    """One rank in the table; None where the rank has not said."""

    rank: int
    device: str
    step: int
    loss: float | None
    steps_per_s: float | None
    step_ms: float | None
    comm_pct: float | None
    data_pct: float | None
    own: Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """All that one frame shows."""

    panels: tuple[Panel, ...]
    split: Split | None
    rows: tuple[Row, ...]
    total: int | None

    def panel(self, key: str) -> Panel:
        """Return the plot of `key`, which must be there."""
        return next(panel for panel in self.panels if panel.key == key)

    @property
    def reporting(self) -> tuple[Row, ...]:
        """Return the ranks that have said anything."""
        return tuple(row for row in self.rows if row.step or row.own)

    @property
    def first_step(self) -> int:
        """Return the step of the rank that is furthest behind."""
        return min((row.step for row in self.reporting), default=0)

    @property
    def last_step(self) -> int:
        """Return the step of the rank that is furthest ahead."""
        return max((row.step for row in self.rows), default=0)

    @property
    def records(self) -> int:
        """Return how many records the longest line shows, 1 when there is no line."""
        return max((len(line.x) for panel in self.panels for line in panel.lines), default=1)

    @property
    def steps_per_s(self) -> float | None:
        """Return the rate of the slowest rank."""
        return min((row.steps_per_s for row in self.rows if row.steps_per_s), default=None)

    @property
    def straggler(self) -> int | None:
        """Return the rank that makes the others wait, None when none does.

        Its own work, a step without its waiting in collectives, is 20 % above the median of the
        others, and that is at least a tenth of the step: where most of a step is communication,
        a little more work is not what the others wait for. Fewer than 50 steps are silent.
        """
        steps = min((row.step for row in self.rows), default=0)
        if self.split is None or len(self.split.ranks) < 2 or steps < FEWEST_STEPS:
            return None
        own = self.split.compute_ms + self.split.data_ms
        worst = int(np.argmax(own))
        others = float(np.median(np.delete(own, worst)))
        step_ms = float(own[worst] + self.split.comm_ms[worst])
        late_ms = own[worst] - others
        matters = late_ms > 0.2 * others > 0 and late_ms > 0.1 * step_ms
        return self.split.ranks[worst] if matters else None


def look(telemetry: Telemetry, info: CellInfo) -> View:
    """Return what there is to see now."""
    latest = dict(telemetry.latest)  # one atomic copy: ranks are added on another thread
    own_keys = sorted({key for values in latest.values() for key in values} - STEP_KEYS)
    panels = [
        _panel(telemetry, "loss", "loss"),
        _panel(telemetry, "comm_s", "communication", "ms", scale=1e3, floor=0.0),
    ]
    own = [_panel(telemetry, key, key) for key in own_keys]
    panels += [p for p in own if p and max(len(line.x) for line in p.lines) > 1][:MOST_OWN]
    means = {key: _means(telemetry, key) for key in ("step_s", "compute_s", "comm_s", "data_s")}
    rows = tuple(_row(info, rank, latest.get(rank, {}), means, own_keys) for rank in info.ranks)
    total = _total(telemetry)
    last = max((row.step for row in rows), default=0)
    return View(
        panels=tuple(p for p in panels if p is not None),
        split=_split(means),
        rows=rows,
        total=total if total >= last and total > 0 else None,
    )


def _total(telemetry: Telemetry) -> int:
    """Return the steps the loop will make; 0 when the ranks do not know.

    A loader knows its own end. A loop that goes through it again has shown that this was not the
    loop's, and what it now says is as little to be relied on.
    """
    known = telemetry.series("total").values()
    if not known or any(s.values[0] != s.values[s.n - 1] for s in known if s.n):
        return 0
    return int(max((s.values[0] for s in known if s.n), default=0))


def _panel(
    telemetry: Telemetry,
    key: str,
    title: str,
    unit: str = "",
    scale: float = 1.0,
    floor: float | None = None,
) -> Panel | None:
    lines, by = [], "step"
    for rank, series in sorted(telemetry.series(key).items()):
        n = series.n
        if not n:
            continue
        # Slices: numpy must not hold the arrays themselves, or they could not grow.
        x = np.array(series.steps[:n], dtype=np.float64)
        y = np.array(series.values[:n], dtype=np.float64) * scale
        if n > 1 and x[-1] == x[0]:
            x, by = np.arange(1.0, n + 1), "record"  # logged without an optimizer
        lines.append(Line(rank, x, y))
    return Panel(key, title, unit, tuple(lines), floor, by) if lines else None


def recent_mean(series: Series) -> float | None:
    """Return the mean of the last `RECENT` finite values, None when there is none.

    The first step of all is left out as soon as there is another: it opens connections and
    compiles, and would be most of a short training.
    """
    begin = max(series.n - RECENT, min(1, series.n - 1))
    tail = np.array(series.values[begin : series.n], dtype=np.float64)
    tail = tail[np.isfinite(tail)]
    return float(tail.mean()) if len(tail) else None


def _means(telemetry: Telemetry, key: str) -> dict[int, float]:
    means = {rank: recent_mean(series) for rank, series in telemetry.series(key).items()}
    return {rank: mean for rank, mean in means.items() if mean is not None}


def _split(means: dict[str, dict[int, float]]) -> Split | None:
    ranks = tuple(sorted(set(means["compute_s"]) | set(means["comm_s"])))
    if not ranks:
        return None

    def column(key: str) -> Floats:
        return np.array([max(0.0, means[key].get(rank, 0.0)) * 1e3 for rank in ranks])

    return Split(ranks, column("compute_s"), column("comm_s"), column("data_s"))


def _row(
    info: CellInfo,
    rank: int,
    latest: Mapping[str, float],
    means: dict[str, dict[int, float]],
    own_keys: list[str],
) -> Row:
    step_s = means["step_s"].get(rank)

    def share(key: str) -> float | None:
        part_s = means[key].get(rank)
        return None if part_s is None or not step_s else min(100.0, 100.0 * part_s / step_s)

    return Row(
        rank=rank,
        device=_device(info, rank),
        step=int(latest.get("step", 0)),
        loss=latest.get("loss"),
        steps_per_s=1.0 / step_s if step_s else None,
        step_ms=step_s * 1e3 if step_s is not None else None,
        comm_pct=share("comm_s"),
        data_pct=share("data_s"),
        own={key: latest[key] for key in own_keys if key in latest},
    )


def _device(info: CellInfo, rank: int) -> str:
    """Return the device's name; `devices` goes with `ranks`, or holds the whole world's."""
    if len(info.devices) == len(info.ranks):
        return info.devices[info.ranks.index(rank)]
    return info.devices[rank] if rank < len(info.devices) else ""
