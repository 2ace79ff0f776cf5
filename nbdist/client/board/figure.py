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

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from nbdist.client.board.artists import PARTS, TEXT_PT, TITLE_PT, part_patch, rank_samples
from nbdist.client.board.palette import Theme
from nbdist.client.board.plots import LinePlot, SplitPlot, tick
from nbdist.client.board.text import figure, length
from nbdist.client.board.view import View
from nbdist.wire import STEP_KEYS

LEGEND_PX, HEAD_PX, ROW_PX = 30, 26, 236  # strips at the top; one row of plots
LEFT_PX, RIGHT_PX = 44, 14
PER_ROW = 3
COLORS = 64


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
        self._plots: list[LinePlot | SplitPlot] = []

    def frame(self, view: View) -> bytes:
        """Return a PNG of `view`."""
        ranks = tuple(row.rank for row in view.rows)
        plan = (tuple(panel.key for panel in view.panels), view.split is not None, ranks)
        if plan != self._plan:
            self._compose(view, ranks)
            self._plan = plan
            self._pixels = None
        moved = [plot.fit(view) for plot in self._plots]
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
        width_px = int(self.width / columns * self.scale)
        for index, key in enumerate(_order(view)):
            axes = self._axes(rows, columns, index)
            if key is None:
                self._plots.append(SplitPlot(axes, self.theme, len(ranks), self.final))
            else:
                panel = view.panel(key)
                plot = LinePlot(axes, panel, ranks, self.theme, width_px, self.final)
                self._plots.append(plot)
        if view.panels:
            self._legend(rank_samples(ranks, self.theme), "left")
        if view.split is not None:
            self._legend([part_patch(name, self.theme, len(ranks)) for name in PARTS], "right")
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
        axes.yaxis.set_major_formatter(FuncFormatter(tick))
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
        parts = [length(view)]
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
        image.save(out, "PNG", compress_level=6 if self.final else 1)
        return out.getvalue()


def _order(view: View) -> list[str | None]:
    """Return what to plot: the keys of lines, and None for the split, before the user's own."""
    keys = [panel.key for panel in view.panels]
    split: list[str | None] = [None] if view.split is not None else []
    return [k for k in keys if k in STEP_KEYS] + split + [k for k in keys if k not in STEP_KEYS]
