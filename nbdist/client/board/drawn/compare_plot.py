"""Draw runs beside each other: loss over the steps with a band over ranks, throughput as bars.

Each run has a colour and a dash pattern, as each rank has on the board. Importing this module loads
matplotlib (0.2 s). Main thread.
"""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from PIL import Image

from nbdist.client.board.drawn.picture import few_colors, single
from nbdist.client.board.palette import Theme, line_style, theme_named
from nbdist.client.output.slots import Slots, is_live
from nbdist.client.tracking.past.compare import Comparison, Entry

WIDTH_IN, HEIGHT_IN = 9.6, 3.4
DPI = 200
MOST_LINES = 8  # more would be a thicket; the table has all of them
TEXT_PT = 9


def show(comparison: Comparison, theme: str) -> None:
    """Display the picture of a comparison, where pictures are shown and there is one to draw."""
    entries = [e for e in comparison.entries if e.curve or e.throughput is not None]
    if is_live() and entries:
        text = " ".join(comparison.sentences) or _beside(len(entries))
        colors = theme_named(theme)
        Slots(live=False).settle([single(picture(entries, colors), text, colors)])


def _beside(count: int) -> str:
    return "One run." if count == 1 else f"{count} runs compared."


def picture(entries: Sequence[Entry], theme: Theme) -> bytes:
    """Return the comparison of these runs, a PNG with two pixels for each CSS pixel."""
    figure = Canvas(figsize=(WIDTH_IN, HEIGHT_IN), dpi=DPI, facecolor=theme.background or "none")
    canvas = FigureCanvasAgg(figure)
    shown = list(entries)[:MOST_LINES]
    has_bars = any(entry.throughput is not None for entry in shown)
    columns = 2 if has_bars else 1
    grid = figure.add_gridspec(1, columns, width_ratios=[3, 2][:columns])
    _losses(_axes(figure, grid[0, 0], theme), shown, theme)
    if has_bars:
        _bars(_axes(figure, grid[0, 1], theme), shown, theme)
    left = f" of {len(entries)} runs" if len(entries) > len(shown) else ""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="upper left", ncols=min(4, len(handles)), frameon=False,
            fontsize=TEXT_PT, labelcolor=theme.text, handlelength=2.6,
            title=f"first {len(shown)}{left}" if left else None,
        )  # fmt: skip
    rows = math.ceil(len(handles) / 4) + bool(left)
    figure.subplots_adjust(
        left=0.065, right=0.985, bottom=0.13, top=0.9 - 0.065 * rows, wspace=0.28
    )
    canvas.draw()  # type: ignore[no-untyped-call]
    pixels = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    return few_colors(Image.fromarray(pixels), theme)


def _axes(figure: Canvas, place: object, theme: Theme) -> Axes:
    axes: Axes = figure.add_subplot(place)  # type: ignore[call-overload]
    frame(axes, theme)
    return axes


def frame(axes: Axes, theme: Theme) -> None:
    """Leave of a frame the lower line, and lines across at each height that is named."""
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.text)
    axes.tick_params(colors=theme.text, labelsize=TEXT_PT, length=0)
    axes.grid(axis="y", color=theme.text, alpha=0.22, linewidth=0.6)
    axes.set_axisbelow(True)


def _title(axes: Axes, text: str, theme: Theme) -> None:
    axes.set_title(text, loc="left", color=theme.text, fontsize=TEXT_PT + 1)


def _losses(axes: Axes, entries: Sequence[Entry], theme: Theme) -> None:
    """Draw each run's loss: the mean over its ranks, and from the lowest to the highest."""
    for place, entry in enumerate(entries):
        rows = [row for row in entry.curve if None not in row]
        if not rows:
            continue
        steps, means, lows, highs = zip(*rows, strict=True)
        color, dashes = line_style(place)
        axes.fill_between(steps, lows, highs, color=color, alpha=0.16, linewidth=0)
        style = (0, dashes) if dashes else "-"
        axes.plot(steps, means, color=color, linestyle=style, linewidth=1.6, label=entry.name)
    lowest = [row[1] for entry in entries for row in entry.curve if None not in row]
    # Where losses span decades, a linear axis would show the first steps and nothing else.
    if lowest and min(lowest) > 0 and max(lowest) / min(lowest) > 100:
        axes.set_yscale("log")
    _title(axes, "loss: mean and range of the ranks", theme)
    axes.set_xlabel("step", color=theme.text, fontsize=TEXT_PT)


def _bars(axes: Axes, entries: Sequence[Entry], theme: Theme) -> None:
    """Draw each run's throughput, with its error bar over the ranks."""
    for place, entry in enumerate(entries):
        if entry.throughput is None:
            continue
        color, _ = line_style(place)
        axes.bar(place, entry.throughput.value, width=0.6, color=color)
        if entry.throughput.error is not None:
            axes.errorbar(
                place, entry.throughput.value, entry.throughput.error, color=theme.text, capsize=4
            )
    names = [e.name if len(e.name) <= 14 else f"{e.name[:13]}…" for e in entries]
    axes.set_xticks(range(len(entries)), names, rotation=20 if len(entries) > 3 else 0)
    _title(axes, "samples/s of all ranks, last steps", theme)
