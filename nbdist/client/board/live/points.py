"""The points of a cell's lines as bytes: what is new since they were taken last, or all of them.

Each line of points has a header, `[line, rank, generation, first, until, count]`: `count` points of
those that the kernel has from its `first` up to `until`, fewer where they were thinned. A page that
has a line up to some place takes what is behind it, drops the line where its generation has changed
(history was rewritten), and asks for all where points are missing. So a page may be told twice, and
may come at any time.

The bytes are float32: the x of the first header's points, their y, and so on. Times are in
milliseconds; x counts steps, of devices the seconds since their first.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from nbdist.client.board.scales import decimate
from nbdist.client.board.scene.devices import QUANTITIES
from nbdist.shared.wire import DEVICE_KEYS, STEP_KEYS

if TYPE_CHECKING:
    from nbdist.client.board.scene.scene import Scene
    from nbdist.client.metrics.detail import Part
    from nbdist.client.metrics.telemetry import Series

MOST_POINTS = 4000  # of a line that is sent whole: pages are up to 2000 pixels wide
MOST_OWN = 12  # lines of numbers that the user logs
_FEW = 256  # points from which on numpy is quicker
# What a page calls a step's numbers, and what they are multiplied with.
LINES = {
    "loss": ("loss", 1.0),
    "log.loss": ("log.loss", 1.0),
    "step_s": ("step", 1e3),
    "compute_s": ("part.compute", 1e3),
    "comm_s": ("part.communication", 1e3),
    "data_s": ("part.data", 1e3),
    "optimizer_s": ("part.optimizer", 1e3),
    "grad_share": ("grad_share", 1.0),
    "expert_tokens": ("experts", 1.0),
}
_OF_SCENE = {"log.loss": ("loss", 1.0), "step_s": ("step", 1e3), "comm_s": ("comm", 1e3)}
Header = tuple[str, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Points:
    """Points of some lines: what is whose, and all of them.

    `lost` says in words that of a range not all is kept, and why.
    """

    headers: tuple[Header, ...]
    data: bytes
    lost: str = ""


class Histories(Protocol):
    """Where the lines are: telemetry, or what stands for one.

    Attributes:
        count: It grows with each record that may bring points.
    """

    count: int

    def keys(self) -> list[str]:
        """Return the keys that have a series."""

    def series(self, key: str) -> "Mapping[int, Series]":
        """Return the history of `key`, by rank."""

    def between(self, key: str, rank: int, low: float, high: float, enough: int) -> "Part":
        """Return a part of a history, see `History.between`."""


@dataclass(frozen=True, slots=True)
class _Line:
    name: str
    rank: int
    series: "Series"
    source: Histories
    key: str  # there
    scale: float = 1.0
    origin: float = 0.0  # where x begins

    @property
    def has_steps(self) -> bool:
        """Whether its points are of several steps: else a page counts them instead."""
        steps, n = self.series.steps, self.series.n
        return n > 0 and steps[n - 1] > steps[0]

    def piece(self, first: int, until: int) -> tuple[Header, bytes]:
        """Return the points between two places, thinned to what a page shows."""
        count, data = self._packed(self.series.steps[first:until], self.series.values[first:until])
        return (self.name, self.rank, self.series.generation, first, until, count), data

    def whole_part(self, part: "Part") -> tuple[Header, bytes]:
        """Return the points of a part, thinned to what a page shows; their places are its own."""
        count, data = self._packed(part.steps, part.values)
        return (self.name, self.rank, 0, 0, len(part.steps), count), data

    def _packed(self, x: "array[float]", y: "array[float]") -> tuple[int, bytes]:
        """Return how many points there are, and them."""
        if len(x) <= _FEW:
            scale, origin = self.scale, self.origin
            if origin:
                x = array("d", [value - origin for value in x])
            if scale != 1.0:
                y = array("d", [value * scale for value in y])
            return len(x), array("f", x).tobytes() + array("f", y).tobytes()
        many_x, many_y = np.array(x), np.array(y)
        if len(x) > MOST_POINTS:
            many_x, many_y = decimate(many_x, many_y, MOST_POINTS // 4)
        with np.errstate(over="ignore"):
            both = (many_x - self.origin, many_y * self.scale)
            return len(many_x), b"".join(part.astype(np.float32).tobytes() for part in both)


class PointStream:
    """The lines of one cell, and how far they were taken. `take` is one thread's, the rest any."""

    def __init__(
        self,
        records: Histories,
        explained: Histories | None = None,
        names: Mapping[str, tuple[str, float]] = LINES,
    ) -> None:
        """Begin with nothing taken.

        Args:
            records: What the ranks have told, by the names of records.
            explained: What follows from it, by the names of lines.
            names: Those of lines, by the names of records, with what these are multiplied with.
        """
        self._records, self._explained, self._names = records, explained, names
        self._taken: dict[tuple[str, int], tuple[int, int]] = {}  # generation, and up to where
        self._counts = (0, 0)  # of both, when points were taken last

    def take(self) -> Points | None:
        """Return what has come since the last call; None where nothing has."""
        counts = self._records.count, self._explained.count if self._explained is not None else 0
        if counts == self._counts:
            return None
        self._counts = counts  # read before the lines: what comes meanwhile is looked for again
        pieces = []
        for line in self._lines():
            n, generation = line.series.n, line.series.generation
            known, first = self._taken.get((line.name, line.rank), (generation, 0))
            if known != generation:
                first = 0
            if first < n:
                self._taken[line.name, line.rank] = generation, n
                pieces.append(line.piece(first, n))
        return _points(pieces) if pieces else None

    def whole(self) -> Points:
        """Return all lines, each thinned to what a page shows."""
        return _points(line.piece(0, line.series.n) for line in self._lines())

    def between(self, low: float, high: float) -> Points:
        """Return what there is from one step to another, finer where it was thinned.

        Lines without a point there, or without steps, are left out. May read the disk.
        """
        pieces, lost = [], ""
        for line in self._lines():
            if line.name.startswith("device.") or not line.has_steps:
                continue
            part = line.source.between(line.key, line.rank, low, high, MOST_POINTS)
            lost = lost or part.lost
            if len(part.steps):
                pieces.append(line.whole_part(part))
        return _points(pieces, lost)

    def _lines(self) -> Iterator[_Line]:
        keys = self._records.keys()
        own = sorted(set(keys) - STEP_KEYS - DEVICE_KEYS - LINES.keys())[:MOST_OWN]
        shown = {key: self._names[key] for key in keys if key in self._names}
        shown |= {key: (f"own.{key}", 1.0) for key in own}
        for key, (name, scale) in shown.items():
            for rank, series in self._records.series(key).items():
                yield _Line(name, rank, series, self._records, key, scale)
        if (explained := self._explained) is not None:
            for name in explained.keys():  # noqa: SIM118  # it is no dict
                for rank, series in explained.series(name).items():
                    yield _Line(name, rank, series, explained, name)
        of_devices = [(key, self._records.series(key)) for key in QUANTITIES if key in keys]
        began = min((s.steps[0] for _, of in of_devices for s in of.values() if s.n), default=0.0)
        for key, by_rank in of_devices:
            for rank, series in by_rank.items():
                yield _Line(f"device.{key}", rank, series, self._records, key, 1.0, began)


def behind_scene(records: Histories) -> PointStream:
    """Return where the lines of `of_scene` are finer, but for parts of steps: they are means."""
    loss = {} if records.series("log.loss") else {"loss": ("loss", 1.0)}
    return PointStream(records, names=_OF_SCENE | loss)


def of_scene(scene: "Scene") -> Points:
    """Return the lines of a board that was kept."""
    named = [("comm" if p.key == "comm_s" else p.key, p) for p in scene.panels]
    ours = {"loss", "comm"}
    found = [(name if name in ours else f"own.{name}", panel) for name, panel in named]
    found += [(f"part.{panel.key}", panel) for panel in scene.history]
    found += [(f"device.{panel.key}", panel) for panel in scene.devices]
    found += [("step", scene.paces)] if scene.paces is not None else []
    found += [(scene.norm.key, scene.norm)] if scene.norm is not None else []
    curves = [(name, curve) for name, panel in found for curve in panel.lines]
    with np.errstate(over="ignore"):
        return Points(
            tuple((name, c.rank, 0, 0, max(c.of, len(c.x)), len(c.x)) for name, c in curves),
            b"".join(v.astype(np.float32).tobytes() for _, c in curves for v in (c.x, c.y)),
        )


def _points(pieces: Iterable[tuple[Header, bytes]], lost: str = "") -> Points:
    found = list(pieces)
    return Points(tuple(header for header, _ in found), b"".join(data for _, data in found), lost)
