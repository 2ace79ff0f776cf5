"""Where a step's time goes: a lying bar of its parts for each rank, and for whom it waits."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch

from nbdist.client.board.drawn.artists import note, part_look, put, rectangles, title
from nbdist.client.board.palette import Theme
from nbdist.client.board.scene.scene import Stack
from nbdist.shared.text import figure

HALF = 0.36  # of a bar's height, in ranks


def draw_lying_bars(axes: Axes, theme: Theme, stack: Stack) -> None:
    """Draw a stacked bar a rank, the first on top; its length and its wait in words behind it."""
    count, whole = len(stack.ranks), stack.whole_ms
    title(axes, "step time, ms", theme)
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_yticks(range(count), [f"rank {rank}" for rank in stack.ranks])
    axes.grid(False)
    axes.grid(axis="x", color=theme.text, alpha=0.22, linewidth=0.6)
    top = float(whole.max())
    axes.set_xlim(0.0, top * 1.02 if top > 0 else 1.0)
    at, base = np.arange(count, dtype=np.float64), np.zeros(count)
    for name, length in stack.parts.items():
        box = rectangles(base, base + length, at - HALF, at + HALF)
        put(axes, [PathPatch(box, **part_look(name, theme, count))])
        base = base + length
    beside = axes.get_yaxis_transform()
    for place, rank in enumerate(stack.ranks):
        words = f"{figure(float(whole[place]))} ms"
        if rank in stack.waits_for:
            awaited, time_ms = stack.waits_for[rank]
            words += f", waits {figure(time_ms)} ms for rank {awaited}"
        put(axes, [note(1.01, place, words, theme, transform=beside)])
