"""One number over the steps: a line for each rank, or a band for many."""

import math

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator

from nbdist.client.board import palette
from nbdist.client.board.drawn.artists import BAND_ALPHAS, area, note, path, put, title
from nbdist.client.board.drawn.measures import TEXT_PT
from nbdist.client.board.palette import Theme
from nbdist.client.board.scales import (
    Floats,
    band,
    bulk_limits,
    decimate,
    mean_over_ranks,
    padded,
    smooth,
    smoothing_window,
)
from nbdist.client.board.scene.scene import Curve, Panel, Scene
from nbdist.client.board.text import tick
from nbdist.shared.text import figure, name_ranks

FAINT_LINES = 2  # up to so many ranks show every value behind their mean; more would be mud
MOST_PEAKS = 20  # triangles of one rank in one plot
MARK_ROWS = 4


class LinePlot:
    """One line a rank, or a band and its extremes for many; drawn when it is made."""

    def __init__(
        self,
        axes: Axes,
        panel: Panel,
        scene: Scene,
        theme: Theme,
        width_px: int,
        *,
        with_mean: bool = False,
    ) -> None:
        self._axes, self._theme, self._lines = axes, theme, panel.lines
        self._columns = max(60, width_px // 3)
        self._order = {rank: i for i, rank in enumerate(scene.ranks)}
        self._set_axes(panel, _range(panel, scene), _note(panel, scene))
        needed = bulk_limits([line.y for line in panel.lines], panel.floor)
        axes.set_ylim(*(padded(needed, panel.floor) if needed else (0.0, 1.0)))
        self._top = needed[1] if needed else math.inf  # what is above is no part of a mean
        if len(scene.ranks) > palette.MANY:
            put(axes, self._band())
        else:
            put(axes, [*self._each(), *self._peaks()])
        if with_mean:
            put(axes, [self._mean()])
        if panel.by == "step":
            put(axes, [a for i, mark in enumerate(scene.marks) for a in self._mark(i, *mark)])

    def _set_axes(self, panel: Panel, x: tuple[float, float], end: str) -> None:
        axes, color = self._axes, self._theme.text
        axes.set_xlim(*x)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(tick))
        title(axes, panel.title + (f", {panel.unit}" if panel.unit else ""), self._theme)
        axes.set_xlabel(panel.by, color=color, fontsize=TEXT_PT, labelpad=1)
        # A second title has the first one's baseline.
        axes.set_title(end, loc="right", fontsize=TEXT_PT, color=color, pad=8)

    def _mark(self, place: int, step: int, words: str) -> list[Artist]:
        """Return a rule at a step, and what was there; neighbours' words stand below each other."""
        top = 0.97 - 0.09 * (place % MARK_ROWS)
        whole = self._axes.get_xaxis_transform()
        rule = Line2D(
            [step, step], [0, 1], color=self._theme.text, linewidth=0.9, linestyle=(0, (4, 3)),
            transform=whole,
        )  # fmt: skip
        return [rule, note(step, top, f" {words}", self._theme, va="top", transform=whole)]

    def _style(self, rank: int) -> tuple[str, tuple[float, ...]]:
        place = self._order.get(rank)
        return (self._theme.text, ()) if place is None else palette.line_style(place)

    def _even(self, y: Floats) -> Floats:
        """Return the running mean, without far spikes: single values above the axis.

        Neighbours above it are a slope, such as a loss at its begin, and count.
        """
        above = y > self._top
        alone = above & ~np.append(above[1:], False) & ~np.append(False, above[:-1])
        return smooth(np.where(alone, np.nan, y), smoothing_window(len(y)))

    def _each(self) -> list[Artist]:
        faint: list[Artist] = []
        strong: list[Line2D] = []
        for line in self._lines:
            x, y = decimate(line.x, line.y, self._columns)
            color, dashes = self._style(line.rank)
            if smoothing_window(len(line.y)) > 1:
                if len(self._lines) <= FAINT_LINES:
                    faint.append(path(x, y, color, (), 0.7, 0.32))
                x, y = decimate(line.x, self._even(line.y), self._columns // 2)
            strong.append(path(x, y, color, dashes, 1.6, 1.0))
            # Draw short series with dots: a single point has no line.
            strong[-1].set_marker("o" if len(x) <= 8 else "")
        if len(self._lines) > FAINT_LINES:
            x, spread = band([(line.x, line.y) for line in self._lines], self._columns)
            seen = np.isfinite(spread[0])
            x, low, high = x[seen], spread[0, seen], spread[-1, seen]
            faint = [area(x, low, high, self._theme.text, BAND_ALPHAS[0])]
        return [*faint, *strong]

    def _mean(self) -> Artist:
        """Return the mean over the ranks that have a value, smoothed like the lines."""
        x, mean = mean_over_ranks([(line.x, line.y) for line in self._lines])
        x, mean = decimate(x, self._even(mean), self._columns // 2)
        return path(x, mean, self._theme.text, (), 2.4, 1.0)

    def _band(self) -> list[Artist]:
        x, spread = band([(line.x, line.y) for line in self._lines], self._columns)
        seen = np.isfinite(spread).all(axis=0)
        if not seen.any():
            return []
        x, (low, low_most, middle, high_most, high) = x[seen], spread[:, seen]
        grey = self._theme.text
        artists: list[Artist] = [
            area(x, low, high, grey, BAND_ALPHAS[0]),
            area(x, low_most, high_most, grey, BAND_ALPHAS[1]),
            path(x, self._even(middle), grey, (), 1.6, 1.0),
        ]
        for place, line in enumerate(_extremes(self._lines)):
            color, dashes = palette.line_style(place)
            line_x, line_y = decimate(line.x, self._even(line.y), self._columns // 2)
            artists.append(path(line_x, line_y, color, dashes, 1.6, 1.0))
            word = "highest" if place == 0 else "lowest"
            artists.append(self._label(f"{word}: rank {line.rank}", color, place))
        return artists

    def _label(self, text: str, color: str, place: int) -> Artist:
        """Name an extreme in the plot's upper right corner, below each other."""
        # Words over a band are read on a ground of their own, where one is known.
        over = self._theme.background
        ground = over and {"facecolor": over, "alpha": 0.8, "edgecolor": "none", "pad": 1.0}
        return Text(
            0.99, 0.98 - 0.085 * place, text, color=color, fontsize=TEXT_PT, ha="right", va="top",
            transform=self._axes.transAxes, bbox=ground,
        )  # fmt: skip

    def _peaks(self) -> list[Artist]:
        """Mark where lines leave the plot: triangles at the upper edge. A band is seen to leave."""
        _, edge = self._axes.get_ylim()
        cut = [(line.rank, line.x[line.y > edge][:MOST_PEAKS]) for line in self._lines]
        return [
            Line2D(
                x, np.full(len(x), 0.975), color=self._style(rank)[0], linestyle="none",
                marker="^", markersize=5.0, markeredgewidth=0,
                transform=self._axes.get_xaxis_transform(),
            )
            for rank, x in cut if len(x)
        ]  # fmt: skip


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


def _range(panel: Panel, scene: Scene) -> tuple[float, float]:
    """Return the x of all plots over the same: they stand beside each other."""
    alike = [one for one in (panel, *scene.panels) if one.by == panel.by]
    first = min(float(line.x[0]) for one in alike for line in one.lines)
    return first, max(first + 1, *(float(line.x[-1]) for one in alike for line in one.lines))


def _note(panel: Panel, scene: Scene) -> str:
    """Say over a finished plot where it ended: in its last step, the mean of the ranks there.

    So do the sentences, the list of runs, `%dist expect` and MLflow.
    """
    last = max(line.x[-1] for line in panel.lines)
    ends = {line.rank: float(line.y[-1]) for line in panel.lines if line.x[-1] == last}
    odd = [rank for rank, end in ends.items() if not math.isfinite(end)]
    if odd:
        return "not finite" if len(odd) == len(panel.lines) else f"not finite on {name_ranks(odd)}"
    if panel.key == "comm_s":
        return "" if scene.comm_pct is None else f"{scene.comm_pct:.0f} % of a step"
    return f"{figure(sum(ends.values()) / len(ends))} in the last {panel.by}"
