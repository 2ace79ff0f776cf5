"""One number over the steps: a line for each rank, or a band for many."""

import math

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator

from nbdist.client.board import palette
from nbdist.client.board.artists import (
    BAND_ALPHAS,
    area,
    draw,
    path,
    pen,
    title,
)
from nbdist.client.board.measures import TEXT_PT
from nbdist.client.board.palette import Theme
from nbdist.client.board.scales import (
    Limits,
    band,
    bulk_limits,
    decimate,
    extent,
    grown,
    mean_over_ranks,
    padded,
    smooth,
    smoothing_window,
)
from nbdist.client.board.scene import ALL, Curve, Panel, Scene
from nbdist.client.board.text import tick
from nbdist.shared.text import figure, name_ranks

FAINT_LINES = 2  # up to so many ranks show every value behind their mean; more would be mud
MOST_PEAKS = 20  # triangles of one rank in one plot


class LinePlot:
    """One number over the steps: one line a rank, or a band and its extremes for many."""

    def __init__(
        self,
        axes: Axes,
        panel: Panel,
        ranks: tuple[int, ...],
        theme: Theme,
        width_px: int,
        final: bool,
        *,
        with_mean: bool = False,
        smoothing: int | None = None,
    ) -> None:
        self.axes, self._theme, self._final = axes, theme, final
        self._key, self._with_mean, self._smoothing = panel.key, with_mean, smoothing
        self._columns = max(60, width_px // 3)
        self._order = {rank: i for i, rank in enumerate(ranks)}
        self._many = len(ranks) > palette.MANY
        # Words over a band are read on a ground of their own, where one is known.
        over = theme.background
        self._ground = over and {"facecolor": over, "alpha": 0.8, "edgecolor": "none", "pad": 1.0}
        self._x: Limits | None = None
        self._y: Limits | None = None
        self._artists: list[Artist] = []
        self._marks: dict[int, Line2D] = {}
        self._pens: dict[int, tuple[Line2D, Line2D]] = {}  # rank to its faint and strong line
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(tick))
        unit = f", {panel.unit}" if panel.unit else ""
        title(axes, panel.title + unit, theme)
        axes.set_xlabel(panel.by, color=theme.text, fontsize=TEXT_PT, labelpad=1)
        # A second title has the first one's baseline.
        self._note = axes.set_title("", loc="right", fontsize=TEXT_PT, color=theme.text, pad=8)

    def fit(self, scene: Scene) -> bool:
        """Take in new data; return whether the axes have changed and must be redrawn."""
        panel = scene.panel(self._key)
        values = [line.y for line in panel.lines]
        needed = bulk_limits(values, panel.floor)
        last = max(float(line.x[-1]) for line in panel.lines)
        first = min(float(line.x[0]) for line in panel.lines)
        x = self._span(first, last)
        y = padded(needed, panel.floor) if needed else (0.0, 1.0)
        if not self._final:
            y = grown(self._y, y)
        changed = x != self._x or y != self._y
        if changed:
            self._x, self._y = x, y
            self.axes.set_xlim(*x)
            self.axes.set_ylim(*y)
        top = needed[1] if needed else math.inf
        self._artists = (
            self._band(panel.lines, top) if self._many else self._lines(panel.lines, top)
        )
        self._artists += self._peaks(panel.lines, y[1])
        if self._with_mean:
            self._artists.append(self._mean(panel.lines, top))
        if self._final:
            self._note.set_text(_note(panel, scene))
        return changed

    def draw(self) -> None:
        """Draw the lines."""
        draw(self._artists, self.axes)

    def _style(self, rank: int) -> tuple[str, tuple[float, ...]]:
        place = self._order.get(rank)
        return (self._theme.text, ()) if place is None else palette.line_style(place)

    def _window(self, points: int) -> int:
        return smoothing_window(points) if self._smoothing is None else self._smoothing

    def _span(self, first: float, last: float) -> Limits:
        if self._final or last <= first:
            return first, max(last, first + 1)
        if self._x is not None and self._x[0] <= first and last <= self._x[1]:
            return self._x
        # From 20 on, so that the first seconds of a training do not redraw axes all the time.
        return first, first + max(20.0, math.ceil((last - first) * 1.25))

    def _lines(self, lines: tuple[Curve, ...], top: float) -> list[Artist]:
        faint: list[Artist] = []
        strong: list[Artist] = []
        for line in lines:
            if line.rank not in self._pens:
                style = self._style(line.rank)
                self._pens[line.rank] = pen(style[0], (), 0.7, 0.32), pen(*style, 1.6, 1.0)
            raw, even = self._pens[line.rank]
            window = self._window(len(line.y))
            if window == 1 or len(lines) <= FAINT_LINES:
                x, y = decimate(line.x, line.y, self._columns)
            if window > 1:
                if len(lines) <= FAINT_LINES:
                    raw.set_data(x, y)
                    faint.append(raw)
                mean = smooth(np.where(line.y > top, np.nan, line.y), window)
                x, y = decimate(line.x, mean, self._columns // 2)
            even.set_data(x, y)
            # Draw short series with dots: a single point has no line.
            even.set_marker("o" if len(x) <= 8 else "")
            strong.append(even)
        if len(lines) > FAINT_LINES:
            faint = [self._range(lines)]
        return faint + strong

    def _mean(self, lines: tuple[Curve, ...], top: float) -> Artist:
        """Return the mean over the ranks that have a value, smoothed like the lines."""
        x, mean = mean_over_ranks([(line.x, line.y) for line in lines])
        even = smooth(np.where(mean > top, np.nan, mean), self._window(len(mean)))
        return path(*decimate(x, even, self._columns // 2), self._theme.text, (), 2.4, 1.0)

    def _range(self, lines: tuple[Curve, ...]) -> Artist:
        """Return the area between the lowest and the highest line."""
        x, (low, high) = extent([(line.x, line.y) for line in lines], self._columns)
        seen = np.isfinite(low)
        return area(x[seen], low[seen], high[seen], self._theme.text, BAND_ALPHAS[0])

    def _band(self, lines: tuple[Curve, ...], top: float) -> list[Artist]:
        x, spread = band([(line.x, line.y) for line in lines], self._columns)
        seen = np.isfinite(spread).all(axis=0)
        if not seen.any():
            return []
        x, (low, low_most, middle, high_most, high) = x[seen], spread[:, seen]
        grey = self._theme.text
        middle = smooth(np.where(middle > top, np.nan, middle), self._window(len(middle)))
        artists: list[Artist] = [
            area(x, low, high, grey, BAND_ALPHAS[0]),
            area(x, low_most, high_most, grey, BAND_ALPHAS[1]),
            path(x, middle, grey, (), 1.6, 1.0),
        ]
        for place, line in enumerate(_extremes(lines)):
            color, dashes = palette.line_style(place)
            even = smooth(np.where(line.y > top, np.nan, line.y), self._window(len(line.y)))
            line_x, line_y = decimate(line.x, even, self._columns // 2)
            artists.append(path(line_x, line_y, color, dashes, 1.6, 1.0))
            word = "highest" if place == 0 else "lowest"
            artists.append(self._label(f"{word}: rank {line.rank}", color, place))
        return artists

    def _label(self, text: str, color: str, place: int) -> Artist:
        """Name an extreme in the plot's upper right corner, below each other."""
        return Text(
            0.99, 0.98 - 0.085 * place, text, color=color, fontsize=TEXT_PT, ha="right", va="top",
            transform=self.axes.transAxes, bbox=self._ground,
        )  # fmt: skip

    def _peaks(self, lines: tuple[Curve, ...], top: float) -> list[Artist]:
        """Mark where lines leave the plot: triangles at the upper edge."""
        if self._many:
            return []  # the band is seen to leave
        artists: list[Artist] = []
        for line in lines:
            x = line.x[line.y > top]
            if len(x):
                if line.rank not in self._marks:
                    self._marks[line.rank] = self._mark(line.rank)
                mark = self._marks[line.rank]
                mark.set_data(x[:MOST_PEAKS], np.full(len(x[:MOST_PEAKS]), 0.975))
                artists.append(mark)
        return artists

    def _mark(self, rank: int) -> Line2D:
        """Return a rank's triangles at the upper edge; kept, as its lines are."""
        mark = pen(self._style(rank)[0], (), 0.0, 1.0)
        mark.set_linestyle("none")
        mark.set_marker("^")
        mark.set_markersize(5.0)
        mark.set_markeredgewidth(0)
        mark.set_transform(self.axes.get_xaxis_transform())
        return mark


def _extremes(lines: tuple[Curve, ...]) -> list[Curve]:
    """Return the lines that are highest and lowest over the last steps; [] where none differs."""
    recent = {line.rank: _recent(line) for line in lines}
    known = [line for line in lines if math.isfinite(recent[line.rank])]
    if len({recent[line.rank] for line in known}) < 2:
        return []  # one, or all equal
    return [
        max(known, key=lambda line: recent[line.rank]),
        min(known, key=lambda line: recent[line.rank]),
    ]


def _recent(line: Curve) -> float:
    """Return where a line is now: where its running mean ends."""
    tail = line.y[-smoothing_window(len(line.y)) :]
    tail = tail[np.isfinite(tail)]
    return float(tail.mean()) if len(tail) else math.nan


def _recent_steps(line: Curve) -> int:
    """Return how many steps that mean is of; a point of a thinned history counts as several."""
    window = smoothing_window(len(line.x))
    return 1 if window == 1 else int(line.x[-1] - line.x[-window]) + 1


def _note(panel: Panel, scene: Scene) -> str:
    """Say over a finished plot where it ended: the mean of all ranks over the last steps."""
    ends = [end for end in map(_recent, panel.lines) if math.isfinite(end)]
    odd = [line.rank for line in panel.lines if not math.isfinite(line.y[-1])]
    if odd == [ALL]:
        return "not finite"
    if ends and odd:
        return f"not finite on {name_ranks(odd)}"
    if not ends:
        return "not finite"
    if panel.key == "comm_s":
        return "" if scene.comm_pct is None else f"{scene.comm_pct:.0f} % of a step"
    end = figure(sum(ends) / len(ends))
    steps = max(_recent_steps(line) for line in panel.lines)
    return f"{end} at the end" if steps == 1 else f"{end}, mean of the last {steps:,} {panel.by}s"
