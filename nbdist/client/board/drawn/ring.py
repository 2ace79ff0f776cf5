"""The ring of the largest all_reduce of a training, as a moving picture.

Bytes, ranks and mean time are those of the training; the order of the rounds is the algorithm's.
"""

from typing import Final

import numpy as np
from matplotlib import colormaps
from PIL import Image

from nbdist.client.board.drawn.animation import Animation, gif_of
from nbdist.client.board.drawn.measures import MARGIN_PX
from nbdist.client.board.drawn.page import Page
from nbdist.client.board.palette import PAPER, Theme
from nbdist.client.board.scene.scene import Scene
from nbdist.client.metrics.analysis.values import CollectiveRow
from nbdist.shared.errors import ClusterError
from nbdist.shared.text import counted, figure, name_bytes
from nbdist.study.ring import rounds_of

WIDE: Final = 640
MOST_FRAMES: Final = 24
_FRAME_MS, _LEFT_PX, _BELOW_PX = 350, 64, 34
_SHADES = colormaps["Blues"].resampled(8)  # more would not be told apart, and take more bytes
_MOST_NUMBERED = 16  # ranks up to which a cell has its number


def animate(scene: Scene) -> Animation:
    """Return the ring of a scene's largest all_reduce.

    Raises:
        ClusterError: There was none between several ranks.
    """
    rings = [r for r in scene.analysis.table if r.kind == "all_reduce" and len(r.ranks) > 1]
    if not rings:
        raise ClusterError(
            "There is no all_reduce to show.", why="no recent step of the last training had one"
        )
    row = max(rings, key=lambda one: one.bytes)
    states = rounds_of(len(row.ranks))
    every = -(-len(states) // MOST_FRAMES)
    chosen = sorted({*range(0, len(states), every), len(states) - 1})
    frames = [_frame(states[at], at, row, scene.emulated) for at in chosen]
    return Animation(gif_of(frames, _FRAME_MS), _words(row, scene.emulated))


def _words(row: CollectiveRow, emulated: str) -> str:
    n = len(row.ranks)
    took = "" if row.transfer_ms is None else f" It took {figure(row.transfer_ms)} ms, the mean."
    said = (
        f"The ring of an all_reduce of {name_bytes(row.bytes)} on {counted(n, 'rank')}: in "
        f"{2 * (n - 1)} rounds each rank sends {name_bytes(row.bytes / n)} to the next, "
        f"{name_bytes(2 * (n - 1) / n * row.bytes)} in all.{took} Bytes and time are measured, "
        "the order of the rounds is the algorithm's."
    )
    return f"Emulated: {emulated}. {said}" if emulated else said


def _frame(held: list[list[int]], at: int, row: CollectiveRow, emulated: str) -> Image.Image:
    n = len(held)
    time = "" if row.transfer_ms is None else f", {figure(row.transfer_ms)} ms, the mean"
    cell_px = max(9, min(30, 420 // n))
    head = [
        f"all_reduce of {name_bytes(row.bytes)}, round {at} of {2 * (n - 1)}: "
        + ("each rank has its own" if not at else "sums grow" if at < n else "sums go around"),
        f"measured: bytes{time}   ·   the algorithm's: the order of the rounds",
        *([f"Emulated: {emulated}"] if emulated else []),
    ]
    page = Page(Theme("#333333", PAPER), WIDE, cell_px * n + _BELOW_PX, 1.0, head)
    axes = page.axes(_LEFT_PX, 0, WIDE - _LEFT_PX - MARGIN_PX, cell_px * n)
    axes.imshow(
        np.array(held), vmin=0, vmax=n, cmap=_SHADES, aspect="auto", interpolation="nearest"
    )
    axes.grid(visible=False)
    axes.set_xticks([])
    step = -(-n // _MOST_NUMBERED)
    axes.set_yticks(range(0, n, step), [f"rank {rank}" for rank in row.ranks[::step]])
    axes.set_xlabel(f"{n} parts of the tensor: of how many ranks each is the sum", fontsize=8)
    if n <= _MOST_NUMBERED:
        for rank, parts in enumerate(held):
            for part, count in enumerate(parts):
                color = "white" if count > n / 2 else "black"
                axes.text(part, rank, str(count), ha="center", va="center", color=color, fontsize=7)
    return Image.fromarray(np.array(page.pixels())).convert("RGB")
