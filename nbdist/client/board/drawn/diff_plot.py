"""Draw where two computations part: distances in their order, beside what may be round-off.

Importing this module loads matplotlib (0.2 s). Main thread.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from PIL import Image

from nbdist.client.board.drawn.compare_plot import TEXT_PT, frame
from nbdist.client.board.drawn.picture import few_colors, single
from nbdist.client.board.palette import Theme, line_style, theme_named
from nbdist.client.metrics.numerics.distances import Curve, first_beyond
from nbdist.client.output.slots import Slots, is_live

WIDTH_IN, HEIGHT_IN, DPI = 9.6, 3.0, 200
_MOST_DOTS: Final = 120
_KINDS: Final = {"loss": "loss, gradients", "gradient": "loss, gradients"}
_LEAST, _MOST = 1e-4, 1e8  # units of the limit; what is equal to the bit lies on the lower edge


def show(curves: Sequence[Curve], text: str, theme: str) -> None:
    """Display the picture, with its words, where pictures are shown."""
    if is_live() and any(curve.distances for curve in curves):
        colors = theme_named(theme)
        Slots(live=False).settle([single(picture(curves, colors), text, colors)])


def picture(curves: Sequence[Curve], theme: Theme) -> bytes:
    """Return the distances of these, a PNG with two pixels for each CSS pixel."""
    figure = Canvas(figsize=(WIDTH_IN, HEIGHT_IN), dpi=DPI, facecolor=theme.background or "none")
    canvas = FigureCanvasAgg(figure)
    axes: Axes = figure.add_subplot()
    frame(axes, theme)
    for number, curve in enumerate(curves):
        _line(axes, curve, number, theme)
    axes.axhline(1, color=theme.text, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.annotate(
        "limit of round-off", (0, 1), xycoords=("axes fraction", "data"), ha="left", va="bottom",
        fontsize=TEXT_PT, color=theme.text,
    )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(_LEAST / 2, _MOST * 2)
    axes.set_yticks([_LEAST, 1, 1e4, _MOST], ["equal", "1", "10⁴", "10⁸"])
    axes.minorticks_off()
    axes.set_ylabel("distance in limits", fontsize=TEXT_PT, color=theme.text)
    _name_kinds(axes, max(curves, key=lambda one: len(one.distances)), theme)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="upper left", ncols=2, frameon=False,
        fontsize=TEXT_PT, labelcolor=theme.text, handlelength=2.6,
    )  # fmt: skip
    figure.subplots_adjust(left=0.085, right=0.985, bottom=0.1, top=0.87)
    canvas.draw()  # type: ignore[no-untyped-call]
    pixels = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    return few_colors(Image.fromarray(pixels), theme)


def _line(axes: Axes, curve: Curve, number: int, theme: Theme) -> None:
    color, dashes = line_style(number)
    heights = [min(max(one.share, _LEAST), _MOST) for one in curve.distances]
    style = (0, dashes) if dashes else "-"
    axes.plot(
        heights, color=color, linestyle=style, linewidth=1.2, label=curve.name,
        marker="." if len(heights) <= _MOST_DOTS else None, markersize=4,
    )  # fmt: skip
    at = first_beyond(curve.distances)
    if at is not None:
        first = curve.distances[at]
        is_late = at > len(heights) / 2
        axes.annotate(
            f"step {first.step}: {first.place}", (at, heights[at]), xytext=(at, 4e6 / 10**number),
            ha="right" if is_late else "left", fontsize=TEXT_PT, color=theme.text,
            arrowprops={
                "arrowstyle": "-", "color": color, "linewidth": 0.8, "relpos": (int(is_late), 0),
            },
        )  # fmt: skip
        axes.plot(
            [at], [heights[at]], marker="o", markersize=7, markerfacecolor="none", color=color
        )


def _name_kinds(axes: Axes, curve: Curve, theme: Theme) -> None:
    """Name below the axis what the places are: kinds of one step, or steps."""
    steps = {one.step for one in curve.distances}
    words = [
        f"step {one.step}" if len(steps) > 1 else _KINDS.get(one.what, f"{one.what}s")
        for one in curve.distances
    ]
    starts = [at for at, word in enumerate(words) if not at or words[at - 1] != word]
    least = max(1, math.ceil(len(words) / 12))  # apart, so that words do not overlap
    shown: list[int] = []
    for at in starts:
        if not shown or at - shown[-1] >= least:
            shown.append(at)
    axes.set_xticks(shown, [words[at] for at in shown], ha="left")
    axes.set_xlim(-0.5, max(1, len(words) - 0.5))
