"""The time line of the last steps: one lane a rank, one bar a collective.

A bar's colour and number name its line in the table. Its shades show what it did: empty while it
queued, hatched while a rank was missing, solid while it moved. The line below a lane is when the
rank's main thread was blocked.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import IdentityTransform

from nbdist.client.board import palette
from nbdist.client.board.artists import draw, note, rectangles, title
from nbdist.client.board.lanes import phases, telling_lanes, tracks
from nbdist.client.board.measures import TEXT_PT
from nbdist.client.board.palette import Theme
from nbdist.client.board.scales import Limits, grown
from nbdist.client.board.scene import Scene
from nbdist.client.metrics.analysis.values import Span, TimeLine, TimelineLane

MOST_NUMBERS = 160  # in the bars; the widest have theirs
OUTLINE = 0.8
NUMBER_PX = 9  # width of a bar that a number fits into
ALPHAS = {"queueing": 0.0, "waiting": 0.2, "transferring": 1.0}  # within a full outline
LANE_TOP, LANE_LOW = -0.36, 0.26  # of the bars in a lane of height 1
BLOCKED_Y = 0.36

Box = tuple[float, float, float, float]  # left, right, low, high


@dataclass(frozen=True, slots=True)
class Number:
    """A number of the table in a bar; `is_solid` when on no hatch."""

    row: int
    x: float
    y: float
    is_solid: bool
    width_ms: float


class TimeLinePlot:
    """Lanes of ranks over milliseconds; lanes and axes are made for one set of ranks."""

    def __init__(
        self, axes: Axes, theme: Theme, scene: Scene, width_px: float, final: bool
    ) -> None:
        self.axes, self._theme, self._final, self._width_px = axes, theme, final, width_px
        self._ranks = [lane.rank for lane in telling_lanes(scene)]
        self._x: Limits | None = None
        self._artists: list[Artist] = []
        title(axes, "time line of the last steps, ms", theme, pad=19)
        axes.set_ylim(len(self._ranks) - 0.5, -0.5)
        axes.set_yticks(range(len(self._ranks)), [f"rank {rank}" for rank in self._ranks])
        axes.grid(False)
        axes.grid(axis="x", color=theme.text, alpha=0.16, linewidth=0.6)

    def fit(self, scene: Scene) -> bool:
        """Take in new data; return whether the axes have changed and must be redrawn."""
        line = scene.analysis.line
        assert line is not None  # it is why there is this plot
        x = (0.0, line.length_ms if line.length_ms > 0 else 1.0)
        if not self._final:
            x = grown(self._x, x)
        changed = x != self._x
        if changed:
            self._x = x
            self.axes.set_xlim(*x)
        lanes = {lane.rank: lane for lane in line.lanes}
        shown = [lanes.get(rank, TimelineLane(rank, (), ())) for rank in self._ranks]
        self._artists = [*self._bars(shown, x), self._blocked(shown), *self._steps(line)]
        return changed

    def draw(self) -> None:
        """Draw the bars."""
        draw(self._artists, self.axes)

    def _bars(self, lanes: list[TimelineLane], x: Limits) -> list[Artist]:
        boxes: dict[tuple[int, str], list[Box]] = {}
        numbers: list[Number] = []
        px_per_ms = self._width_px / (x[1] - x[0])
        placed_in = tracks(lanes)
        count = 1 + max((track for placed in placed_in for track in placed), default=0)
        height = (LANE_LOW - LANE_TOP) / count
        for place, (lane, placed) in enumerate(zip(lanes, placed_in, strict=True)):
            for span, track in zip(lane.spans, placed, strict=True):
                high = place + LANE_TOP + track * height
                low = high + 0.92 * height
                for name, (begin, end) in phases(span).items():
                    boxes.setdefault((span.row, name), []).append((begin, end, low, high))
                at = _number_at(span, px_per_ms)
                if at is not None:
                    width_ms = span.end_ms - span.begin_ms
                    numbers.append(Number(span.row, at[0], (low + high) / 2, at[1], width_ms))
        artists: list[Artist] = []
        hatched: dict[str, list[Box]] = {}
        for (row, name), found in boxes.items():
            artists.append(filled(found, palette.row_color(row), ALPHAS[name]))
            if name == "waiting":
                hatched.setdefault(palette.row_color(row), []).extend(found)
        artists += [hatch_over(found, color) for color, found in hatched.items()]
        numbers.sort(key=lambda number: -number.width_ms)
        return artists + self._numbers(numbers[:MOST_NUMBERS], height, px_per_ms)

    def _numbers(self, numbers: list[Number], height: float, px_per_ms: float) -> list[Artist]:
        """Return numbers as outlines of their digits, one path an ink: a text takes 0.5 ms."""
        grounds: dict[str, list[Box]] = {}
        digits: dict[str, list[Path]] = {}
        pixels = TEXT_PT / 72 * self.axes.figure.dpi
        for number in numbers:
            color, words = palette.row_color(number.row), str(number.row + 1)
            if not number.is_solid:  # on a hatch only a ground of its own makes it legible
                half_ms = 0.4 * NUMBER_PX * len(words) / px_per_ms
                edges = number.y - 0.42 * height, number.y + 0.42 * height
                grounds.setdefault(color, []).append(
                    (number.x - half_ms, number.x + half_ms, *edges)
                )
            place = self.axes.transData.transform((number.x, number.y))
            outline = _outline(words)
            digits.setdefault(_ink(color), []).append(
                Path(np.asarray(outline.vertices) * pixels + place, outline.codes)
            )
        artists: list[Artist] = [filled(boxes, color, 1.0) for color, boxes in grounds.items()]
        return artists + [
            PathPatch(
                Path.make_compound_path(*paths), facecolor=ink, linewidth=0,
                transform=IdentityTransform(),
            )
            for ink, paths in digits.items()
        ]  # fmt: skip

    def _blocked(self, lanes: list[TimelineLane]) -> Artist:
        x: list[float] = []
        y: list[float] = []
        for place, lane in enumerate(lanes):
            for begin, end in lane.blocked:
                x += [begin, end, np.nan]
                y += [place + BLOCKED_Y, place + BLOCKED_Y, np.nan]
        return Line2D(x, y, color=self._theme.text, linewidth=2.6, solid_capstyle="butt")

    def _steps(self, line: TimeLine) -> list[Artist]:
        """Return where steps begin, and their numbers above."""
        bottom = len(self._ranks) - 0.5
        x = [at for _, begin, _ in line.steps for at in (begin, begin, np.nan)]
        y = [at for _ in line.steps for at in (-0.5, bottom, np.nan)]
        rules = Line2D(x, y, color=self._theme.text, linewidth=0.9, linestyle=(0, (4, 3)))
        names: list[Artist] = [
            note(
                (begin + end) / 2, 1.0, f"step {number:,}", self._theme, ha="center", va="bottom",
                transform=self.axes.get_xaxis_transform(), clip_on=False,
            )
            for number, begin, end in line.steps
        ]  # fmt: skip
        return [rules, *names]


def _number_at(span: Span, px_per_ms: float) -> tuple[float, bool] | None:
    """Return where a span's number fits, and whether that is solid; None when nowhere."""
    needed_ms = NUMBER_PX * len(str(span.row + 1)) / px_per_ms
    begin, end = phases(span).get("transferring", (0.0, 0.0))
    if end - begin >= needed_ms:
        return (begin + end) / 2, True
    if span.end_ms - span.begin_ms >= needed_ms:
        return (span.begin_ms + span.end_ms) / 2, False
    return None


@cache
def _outline(words: str) -> Path:
    """Return words as a path about the origin, of a font one pixel high."""
    drawn = TextPath((0, 0), words, size=1, prop=FontProperties(weight="bold"))
    box = drawn.get_extents()
    middle = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
    return Path(np.asarray(drawn.vertices) - middle, drawn.codes)


def legend(theme: Theme, labels: tuple[str, str, str, str]) -> list[Artist]:
    """Return what the shades mean, in this order."""
    queueing, waiting, transferring, blocked = labels
    color = palette.LINE_COLORS[0]
    return [
        Patch(facecolor="none", edgecolor=color, linewidth=OUTLINE, label=queueing),
        Patch(facecolor=(*_rgb(color), ALPHAS["waiting"]), edgecolor=color, hatch="/////",
              linewidth=0, label=waiting),
        Patch(facecolor=color, label=transferring),
        Line2D([], [], color=theme.text, linewidth=2.6, label=blocked),
    ]  # fmt: skip


def filled(boxes: list[Box], color: str, alpha: float) -> PathPatch:
    """Return boxes of one colour, with an outline that is seen however faint they are."""
    inside = (*_rgb(color), alpha)
    return PathPatch(_path(boxes), facecolor=inside, edgecolor=color, linewidth=OUTLINE)


def hatch_over(boxes: list[Box], color: str) -> PathPatch:
    """Return the hatch of boxes that are filled already with less of the same colour.

    Strong on faint is seen whatever the colour and the background, as a grey ink is not on grey.
    One path a colour, for each prepares a hatch.
    """
    return PathPatch(_path(boxes), facecolor="none", edgecolor=color, hatch="/////", linewidth=0)


def _path(boxes: list[Box]) -> Path:
    left, right, low, high = np.array(boxes, dtype=np.float64).T
    return rectangles(left, right, low, high)


def _rgb(color: str) -> tuple[float, float, float]:
    return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))  # type: ignore[return-value]


def _ink(color: str) -> str:
    """Return black or white, whichever is read better on `color`."""
    dark, light = "#111111", "#ffffff"
    is_dark = palette.contrast(color, dark) >= palette.contrast(color, light)
    return dark if is_dark else light
