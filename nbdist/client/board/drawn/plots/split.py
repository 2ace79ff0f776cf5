"""Where a recent step's time goes: one stacked bar a rank."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch

from nbdist.client.board import palette
from nbdist.client.board.drawn.artists import note, part_look, put, rectangles, title
from nbdist.client.board.drawn.measures import TEXT_PT
from nbdist.client.board.palette import Theme
from nbdist.client.board.scene.scene import Stack
from nbdist.shared.text import figure

HALF = 0.36  # of a bar's width, in ranks


def draw_split(axes: Axes, theme: Theme, stack: Stack) -> None:
    """Draw the bars, of the same parts as those of the view `step`."""
    count = len(stack.ranks)
    title(axes, "step time, ms", theme)
    axes.set_xlabel("rank", color=theme.text, fontsize=TEXT_PT, labelpad=1)
    shown = range(0, count, 1 << max(0, math.ceil(math.log2(count / 12))))
    axes.set_xticks(list(shown), [str(stack.ranks[i]) for i in shown])
    # Air on both sides keeps two bars from looking like two walls.
    air = 0.6 if count > 3 else 0.9
    axes.set_xlim(-air, count - 1 + air)
    top = float(stack.whole_ms.max())
    axes.set_ylim(0.0, top * 1.12 if top > 0 else 1.0)
    base, at = np.zeros(count), np.arange(count, dtype=np.float64)
    for name, height in stack.parts.items():
        box = rectangles(at - HALF, at + HALF, base, base + height)
        put(axes, [PathPatch(box, **part_look(name, theme, count))])
        base = base + height
    if count <= palette.MANY:
        ends = zip(at, base, strict=True)
        put(axes, [note(x, h, figure(h), theme, ha="center", va="bottom") for x, h in ends])
