"""Draw a `View` into a PNG, fast enough for a few frames a second.

Axes, ticks and titles are drawn once and kept as pixels; a frame restores them and draws only
the lines and bars upon them (blitting), from decimated data, and is written with 64 colours.
Axes are redrawn when a limit must change, which is why limits grow by a quarter.

matplotlib's `Figure` and Agg canvas, never pyplot: its global state is not for threads. A
`Painter` belongs to one thread at a time. Importing this module loads matplotlib (0.2 s).
"""

import io
import math
from typing import Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from nbdist.client.board import palette
from nbdist.client.board.palette import Theme
from nbdist.client.board.scales import (
    Floats,
    Limits,
    band,
    bulk_limits,
    decimate,
    grown,
    padded,
    smooth,
    smoothing_window,
)
from nbdist.client.board.text import figure
from nbdist.client.board.view import Line, Panel, Split, View

TEXT_PT, TITLE_PT = 8.0, 9.5
LEGEND_PX, HEAD_PX, ROW_PX = 30, 26, 236  # strips at the top; one row of plots
LEFT_PX, RIGHT_PX = 44, 14
PER_ROW = 3
COLORS = 64
BAND_ALPHAS = 0.14, 0.26  # of all ranks, and of the middle 80 % of them
FAINT_LINES = 4  # up to so many ranks show every value behind their mean; more would be mud
MOST_PEAKS = 20  # triangles of one rank in one plot
PARTS = {
    "compute": palette.COMPUTE,
    "communication": palette.COMM,
    "data": palette.DATA,
}


class Painter:
    """Draws the frames of one board.

    Args:
        theme: Colours of text and background.
        width: CSS pixels. The height follows from what there is to see.
        scale: Pixels of the PNG for one CSS pixel; 2 is sharp on any screen.
        final: Fit the axes tightly and write figures on the plots, for a picture that stays.
    """

    def __init__(
        self, theme: Theme, width: int = 960, scale: float = 1.0, *, final: bool = False
    ) -> None:
        self.theme, self.width, self.scale, self.final = theme, width, scale, final
        self._top_px = LEGEND_PX + (HEAD_PX if final else 0)
        self.height = self._top_px + ROW_PX
        self.redraws = 0  # how often axes were drawn anew; for tests and the benchmark
        self._plan: tuple[object, ...] = ()
        self._plots: list[_LinePlot | _SplitPlot] = []

    def frame(self, view: View) -> bytes:
        """Return a PNG of `view`."""
        ranks = tuple(row.rank for row in view.rows)
        plan = (tuple(panel.key for panel in view.panels), view.split is not None, ranks)
        if plan != self._plan:
            self._compose(view, ranks)
            self._plan = plan
            self._pixels = None
        contents: list[Panel | Split] = [*view.panels]
        if view.split is not None:
            contents.append(view.split)
        moved = [
            plot.fit(content, view)  # type: ignore[arg-type]  # made in this order
            for plot, content in zip(self._plots, contents, strict=True)
        ]
        if self.final:
            self._write_head(view)
        if any(moved) or self._pixels is None:
            self._canvas.draw()  # type: ignore[no-untyped-call]
            self._pixels = self._canvas.copy_from_bbox(self._figure.bbox)  # type: ignore[no-untyped-call]
            self.redraws += 1
        self._canvas.restore_region(self._pixels)  # type: ignore[no-untyped-call]
        for plot in self._plots:
            plot.draw()
        return self._encode()

    def _compose(self, view: View, ranks: tuple[int, ...]) -> None:
        count = max(1, len(view.panels) + (view.split is not None))
        columns = min(count, PER_ROW) if count != 4 else 2
        rows = math.ceil(count / columns)
        self.height = self._top_px + rows * ROW_PX
        self._figure = Figure(
            figsize=(self.width / 100, self.height / 100),
            dpi=100 * self.scale,
            facecolor=self.theme.background or "none",
        )
        self._canvas = FigureCanvasAgg(self._figure)
        self._figure.subplots_adjust(
            left=LEFT_PX / self.width,
            right=1 - RIGHT_PX / self.width,
            top=1 - (self._top_px + 24) / self.height,
            bottom=38 / self.height,
            wspace=0.17,
            hspace=0.42,
        )
        self._plots = []
        for index, panel in enumerate(view.panels):
            axes = self._axes(rows, columns, index)
            width_px = int(self.width / columns * self.scale)
            self._plots.append(_LinePlot(axes, panel, ranks, self.theme, width_px, self.final))
        if view.panels:
            self._legend(_rank_samples(ranks, self.theme), "left")
        if view.split is not None:
            axes = self._axes(rows, columns, len(view.panels))
            self._plots.append(_SplitPlot(axes, self.theme, len(ranks), self.final))
            self._legend([_part_patch(name, self.theme, len(ranks)) for name in PARTS], "right")
        self._head = self._figure.text(
            12 / self.width,
            1 - 17 / self.height,
            "",
            va="center",
            fontsize=TITLE_PT,
            color=self.theme.text,
        )

    def _axes(self, rows: int, columns: int, index: int) -> Axes:
        axes = self._figure.add_subplot(rows, columns, index + 1)
        axes.set_facecolor("none")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(self.theme.text)
        axes.spines["bottom"].set_alpha(0.6)
        axes.tick_params(colors=self.theme.text, labelsize=TEXT_PT, length=0, pad=4)
        axes.grid(axis="y", color=self.theme.text, alpha=0.22, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(_tick))
        return axes

    def _legend(self, handles: list[Artist], side: Literal["left", "right"]) -> None:
        x = 12 / self.width if side == "left" else 1 - RIGHT_PX / self.width
        legend = self._figure.legend(
            handles=handles,
            loc="center left" if side == "left" else "center right",
            bbox_to_anchor=(x, 1 - (self._top_px - 13) / self.height),
            ncols=len(handles),
            frameon=False,
            fontsize=TEXT_PT,
            handlelength=2.2 if side == "left" else 1.1,
            handleheight=0.9,
            handletextpad=0.5,
            columnspacing=1.2,
            borderpad=0,
            borderaxespad=0,
        )
        for text in legend.get_texts():
            text.set_color(self.theme.text)

    def _write_head(self, view: View) -> None:
        parts = [f"{view.last_step:,} steps"] if view.last_step else []
        if view.steps_per_s:
            parts.append(f"{figure(view.steps_per_s)} steps/s")
        if view.straggler is not None:
            parts.append(f"rank {view.straggler} makes the others wait")
        plotted = {panel.key for panel in view.panels}
        for key in sorted({key for row in view.rows for key in row.own} - plotted)[:2]:
            values = [row.own[key] for row in view.rows if key in row.own]
            parts.append(f"{key} {figure(sum(values) / len(values))}")
        self._head.set_text("   ·   ".join(parts))

    def _encode(self) -> bytes:
        size = self._canvas.get_width_height()
        pixels = self._canvas.buffer_rgba()  # type: ignore[no-untyped-call]
        image = Image.frombuffer("RGBA", size, bytes(pixels), "raw", "RGBA", 0, 1)
        if self.theme.background is not None:
            image = image.convert("RGB")
        # FASTOCTREE is Pillow's only quantiser that keeps transparency, and the fastest.
        image = image.quantize(COLORS, method=Image.Quantize.FASTOCTREE)
        out = io.BytesIO()
        image.save(out, "PNG", compress_level=9 if self.final else 1)
        return out.getvalue()


class _LinePlot:
    """One number over the steps: one line a rank, or a band and its extremes for many."""

    def __init__(
        self,
        axes: Axes,
        panel: Panel,
        ranks: tuple[int, ...],
        theme: Theme,
        width_px: int,
        final: bool,
    ) -> None:
        self._axes, self._theme, self._final = axes, theme, final
        self._columns = max(60, width_px // 3)
        self._order = {rank: i for i, rank in enumerate(ranks)}
        self._many = len(ranks) > palette.MANY
        self._x: Limits | None = None
        self._y: Limits | None = None
        self._artists: list[Artist] = []
        self._pens: dict[int, tuple[Line2D, Line2D]] = {}  # rank to its faint and strong line
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(_tick))
        unit = f", {panel.unit}" if panel.unit else ""
        _title(axes, panel.title + unit, theme)
        axes.set_xlabel("step", color=theme.text, fontsize=TEXT_PT, labelpad=1)
        self._note = axes.text(
            1.0, 1.035, "", transform=axes.transAxes, ha="right", va="bottom",
            fontsize=TEXT_PT, color=theme.text,
        )  # fmt: skip

    def fit(self, panel: Panel, view: View) -> bool:
        """Take in new data; return whether the axes have changed and must be drawn anew."""
        values = [line.y for line in panel.lines]
        needed = bulk_limits(values, panel.floor)
        last = max(float(line.x[-1]) for line in panel.lines)
        first = min(float(line.x[0]) for line in panel.lines)
        x = self._span(first, last, view.total)
        y = padded(needed, panel.floor) if needed else (0.0, 1.0)
        if not self._final:
            y = grown(self._y, y)
        changed = x != self._x or y != self._y
        if changed:
            self._x, self._y = x, y
            self._axes.set_xlim(*x)
            self._axes.set_ylim(*y)
        top = needed[1] if needed else math.inf
        self._artists = (
            self._band(panel.lines, top) if self._many else self._lines(panel.lines, top)
        )
        self._artists += self._peaks(panel.lines, y[1])
        if self._final:
            self._note.set_text(_note(panel, view.split))
        return changed

    def draw(self) -> None:
        """Draw the lines."""
        _draw(self._artists, self._axes)

    def _span(self, first: float, last: float, total: int | None) -> Limits:
        if self._final or last <= first:
            return first, max(last, first + 1)
        if total:
            return min(first, 1.0), float(max(total, 2))
        if self._x is not None and self._x[0] <= first and last <= self._x[1]:
            return self._x
        # From 20 on, so that the first seconds of a training do not redraw axes all the time.
        return first, first + max(20.0, math.ceil((last - first) * 1.25))

    def _lines(self, lines: tuple[Line, ...], top: float) -> list[Artist]:
        faint: list[Artist] = []
        strong: list[Artist] = []
        for line in lines:
            if line.rank not in self._pens:
                style = palette.line_style(self._order.get(line.rank, 0))
                self._pens[line.rank] = _pen(style[0], (), 0.7, 0.32), _pen(*style, 1.6, 1.0)
            raw, even = self._pens[line.rank]
            x, y = decimate(line.x, line.y, self._columns)
            window = smoothing_window(len(line.y))
            if window > 1:
                if len(lines) <= FAINT_LINES:
                    raw.set_data(x, y)
                    faint.append(raw)
                mean = smooth(np.where(line.y > top, np.nan, line.y), window)
                x, y = decimate(line.x, mean, self._columns // 4)
            even.set_data(x, y)
            # Draw short series with dots: a single point has no line.
            even.set_marker("o" if len(x) <= 8 else "")
            strong.append(even)
        if len(lines) > FAINT_LINES:
            faint = [self._range(lines)]
        return faint + strong

    def _range(self, lines: tuple[Line, ...]) -> Artist:
        """Return the area between the lowest and the highest line."""
        x, (low, *_, high) = band([(line.x, line.y) for line in lines], self._columns)
        seen = np.isfinite(low)
        return _area(x[seen], low[seen], high[seen], self._theme.text, BAND_ALPHAS[0])

    def _band(self, lines: tuple[Line, ...], top: float) -> list[Artist]:
        x, spread = band([(line.x, line.y) for line in lines], self._columns)
        seen = np.isfinite(spread).all(axis=0)
        if not seen.any():
            return []
        x, (low, low_most, middle, high_most, high) = x[seen], spread[:, seen]
        grey = self._theme.text
        middle = smooth(np.where(middle > top, np.nan, middle), smoothing_window(len(middle)))
        artists: list[Artist] = [
            _area(x, low, high, grey, BAND_ALPHAS[0]),
            _area(x, low_most, high_most, grey, BAND_ALPHAS[1]),
            _path(x, middle, grey, (), 1.6, 1.0),
        ]
        for place, line in enumerate(_extremes(lines)):
            color, dashes = palette.line_style(place)
            even = smooth(np.where(line.y > top, np.nan, line.y), smoothing_window(len(line.y)))
            line_x, line_y = decimate(line.x, even, self._columns // 4)
            artists.append(_path(line_x, line_y, color, dashes, 1.6, 1.0))
            word = "highest" if place == 0 else "lowest"
            artists.append(self._label(f"{word}: rank {line.rank}", color, place))
        return artists

    def _label(self, text: str, color: str, place: int) -> Artist:
        """Name an extreme in the plot's upper right corner, below each other."""
        return Text(
            0.99, 0.98 - 0.085 * place, text, color=color, fontsize=TEXT_PT, ha="right", va="top",
            transform=self._axes.transAxes,
        )  # fmt: skip

    def _peaks(self, lines: tuple[Line, ...], top: float) -> list[Artist]:
        """Mark where lines leave the plot: triangles at the upper edge."""
        if self._many:
            return []  # the band is seen to leave
        artists: list[Artist] = []
        for line in lines:
            x = line.x[line.y > top]
            if len(x):
                mark = _pen(palette.line_style(self._order.get(line.rank, 0))[0], (), 0.0, 1.0)
                mark.set_data(x[:MOST_PEAKS], np.full(len(x[:MOST_PEAKS]), 0.975))
                mark.set_linestyle("none")
                mark.set_marker("^")
                mark.set_markersize(5.0)
                mark.set_markeredgewidth(0)
                mark.set_transform(self._axes.get_xaxis_transform())
                artists.append(mark)
        return artists


class _SplitPlot:
    """Where a recent step's time goes: one stacked bar a rank."""

    def __init__(self, axes: Axes, theme: Theme, ranks: int, final: bool) -> None:
        self._axes, self._theme, self._final = axes, theme, final
        self._ranks: tuple[int, ...] = ()
        self._y: Limits | None = None
        self._artists: list[Artist] = []
        self._parts = [_part_patch(name, theme, ranks) for name in PARTS]
        _title(axes, "step time, ms", theme)
        axes.set_xlabel("rank", color=theme.text, fontsize=TEXT_PT, labelpad=1)

    def fit(self, split: Split, view: View) -> bool:
        """Take in new data; return whether the axes have changed and must be drawn anew."""
        stack = np.stack([split.compute_ms, split.comm_ms, split.data_ms])
        top = float(stack.sum(axis=0).max())
        y = (0.0, top * 1.12 if top > 0 else 1.0)
        if not self._final:
            y = grown(self._y, y)
        changed = split.ranks != self._ranks or y != self._y
        if changed:
            self._show_ranks(split.ranks)
            self._y = y
            self._axes.set_ylim(*y)
        base = np.zeros(len(split.ranks))
        at = np.arange(len(split.ranks), dtype=np.float64)
        self._artists = []
        for patch, height in zip(self._parts, stack, strict=True):
            # One path for all ranks: Agg prepares a hatch for each path it draws (2 ms).
            bars = PathPatch(_boxes(at, base, height))
            bars.update_from(patch)
            self._artists.append(bars)
            base = base + height
        if self._final and len(split.ranks) <= palette.MANY:
            self._artists += [self._figure_over(x, h) for x, h in zip(at, base, strict=True)]
        return changed

    def draw(self) -> None:
        """Draw the bars."""
        _draw(self._artists, self._axes)

    def _show_ranks(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        every = 1 << max(0, math.ceil(math.log2(len(ranks) / 12)))
        shown = range(0, len(ranks), every)
        self._axes.set_xticks(list(shown), [str(ranks[i]) for i in shown])
        # Air on both sides keeps two bars from looking like two walls.
        air = 0.6 if len(ranks) > 3 else 0.9
        self._axes.set_xlim(-air, len(ranks) - 1 + air)

    def _figure_over(self, x: float, height: float) -> Artist:
        return Text(
            x, height, figure(height), color=self._theme.text, fontsize=TEXT_PT, ha="center",
            va="bottom",
        )  # fmt: skip


def _draw(artists: list[Artist], axes: Axes) -> None:
    """Draw `artists` into `axes` without adding them: they live for one frame."""
    for artist in artists:
        if artist.axes is None:
            artist.axes = axes
            artist.set_figure(axes.figure)
            if not artist.is_transform_set():
                artist.set_transform(axes.transData)
            artist.set_clip_box(axes.bbox)
        axes.draw_artist(artist)


def _boxes(at: Floats, base: Floats, height: Floats) -> Path:
    """Return one path of a box a rank."""
    left, right, top = at - 0.36, at + 0.36, base + height
    corners_KR2 = np.stack(
        [
            np.stack([left, base], axis=1),
            np.stack([left, top], axis=1),
            np.stack([right, top], axis=1),
            np.stack([right, base], axis=1),
            np.stack([left, base], axis=1),
        ]
    )
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(at)
    return Path(corners_KR2.transpose(1, 0, 2).reshape(-1, 2), codes)


def _part_patch(name: str, theme: Theme, ranks: int) -> Patch:
    """Return how one part of a step looks, in bars and legend; thin bars carry no hatch."""
    hatch = palette.HATCHES[name] if ranks <= 2 * palette.MANY else ""
    over = theme.background or "#ffffff"
    return Patch(facecolor=PARTS[name], edgecolor=over, linewidth=0, label=name, hatch=hatch)


def _area(x: Floats, low: Floats, high: Floats, color: str, alpha: float) -> PathPatch:
    edge_x, edge_y = np.concatenate([x, x[::-1]]), np.concatenate([low, high[::-1]])
    outline = Path(np.stack([edge_x, edge_y], axis=1), closed=False)
    return PathPatch(outline, facecolor=color, alpha=alpha, linewidth=0)


def _pen(color: str, dashes: tuple[float, ...], width: float, alpha: float) -> Line2D:
    """Return a line without points; making one costs as much as drawing it."""
    line = Line2D([], [], color=color, linewidth=width, alpha=alpha, solid_capstyle="round")
    line.set_markersize(3.0)
    if dashes:
        line.set_dashes(dashes)
    return line


def _path(
    x: Floats, y: Floats, color: str, dashes: tuple[float, ...], width: float, alpha: float
) -> Line2D:
    line = _pen(color, dashes, width, alpha)
    line.set_data(x, y)
    return line


def _rank_samples(ranks: tuple[int, ...], theme: Theme) -> list[Artist]:
    """Return what the legend says of the lines."""
    if len(ranks) <= palette.MANY:
        return [_sample(f"rank {rank}", place) for place, rank in enumerate(ranks)]
    all_of_them, most = BAND_ALPHAS
    return [
        Patch(facecolor=theme.text, alpha=all_of_them, label=f"all {len(ranks)} ranks"),
        Patch(facecolor=theme.text, alpha=min(1.0, all_of_them + most), label="80 % of them"),
        Line2D([], [], color=theme.text, linewidth=1.6, label="median"),
        _sample("highest", 0),
        _sample("lowest", 1),
    ]


def _sample(label: str, place: int) -> Line2D:
    line = _pen(*palette.line_style(place), 1.8, 1.0)
    line.set_label(label)
    return line


def _extremes(lines: tuple[Line, ...]) -> list[Line]:
    """Return the lines that are highest and lowest over the last steps."""
    recent = {line.rank: _recent(line) for line in lines}
    known = [line for line in lines if math.isfinite(recent[line.rank])]
    if len(known) < 2:
        return []
    return [
        max(known, key=lambda line: recent[line.rank]),
        min(known, key=lambda line: recent[line.rank]),
    ]


def _recent(line: Line) -> float:
    tail = line.y[-50:]
    tail = tail[np.isfinite(tail)]
    return float(tail.mean()) if len(tail) else math.nan


def _note(panel: Panel, split: Split | None) -> str:
    """Say over a finished plot where it ended: the mean of all ranks over the last steps."""
    ends = [end for end in map(_recent, panel.lines) if math.isfinite(end)]
    if not ends:
        return "not finite"
    if panel.key == "comm_s" and split is not None:
        whole = float((split.compute_ms + split.comm_ms + split.data_ms).sum())
        return f"{100 * float(split.comm_ms.sum()) / whole:.0f} % of a step" if whole else ""
    return f"{figure(sum(ends) / len(ends))} at the end"


def _title(axes: Axes, text: str, theme: Theme) -> None:
    axes.set_title(text, loc="left", fontsize=TITLE_PT, color=theme.text, fontweight="bold", pad=8)


def _tick(value: float, position: int | None = None) -> str:
    """Return a short label: 0.5, 20, 1k, 12k."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:g}"
