"""Each rank: what it is, how fast, how much memory, and the time of its steps.

A small multiple for each rank; more than `MOST_CARDS` are strips, with the extremes named.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from nbdist.client.board import palette
from nbdist.client.board.measures import MARGIN_PX, TITLE_PT
from nbdist.client.board.tables import ViewTable, or_dash
from nbdist.formatting import counted, figure, name_bytes
from nbdist.ranks import name_ranks

if TYPE_CHECKING:  # for their types alone: they load numpy and matplotlib
    from nbdist.client.board.page import Page, Plot
    from nbdist.client.board.scales import Floats
    from nbdist.client.board.scene import Row, Scene

NAME, CAPTION = "ranks", "Speed and memory"
HELP = "each rank's state, speed and memory"
HISTORIES: tuple[str, ...] = ("step_s",)
HAS_SMOOTHING, TELLS_VERDICTS = False, False

MOST_CARDS = 16
CARD_PX, WORDS_PX, GAP_PX = 138, 58, 26
TITLE_PX = 24
LEFT_PX = 34
STRIP_PX, STRIPS_LEFT_PX, STRIPS_WORDS_PX, ABOVE_PX, BELOW_PX = 36, 96, 258, 12, 36

Get = Callable[["Row"], float | None]
Write = Callable[[float], str]

# Name, colour, what is read of a row, how it is written.
_NUMBERS: tuple[tuple[str, str, Get, Write], ...] = (
    ("steps/s", palette.LINE_COLORS[0], lambda row: row.steps_per_s, figure),
    ("samples/s", palette.LINE_COLORS[5], lambda row: row.samples_per_s, figure),
    ("tokens/s", palette.LINE_COLORS[2], lambda row: row.tokens_per_s, figure),
    ("memory", palette.LINE_COLORS[1], lambda row: row.memory_bytes, name_bytes),
    ("device memory", palette.LINE_COLORS[3], lambda row: row.cuda_bytes, name_bytes),
    ("its peak", palette.LINE_COLORS[3], lambda row: row.cuda_peak_bytes, name_bytes),
)


def plan(scene: "Scene", final: bool) -> tuple[object, ...]:
    """Return the ranks; for strips, also what is known of them."""
    return scene.ranks, _names(scene) if len(scene.ranks) > MOST_CARDS else ()


def height(scene: "Scene", final: bool) -> int:
    """Return the height of the page."""
    if len(scene.ranks) > MOST_CARDS:
        return ABOVE_PX + STRIP_PX * max(1, len(_names(scene))) + BELOW_PX
    rows = math.ceil(len(scene.ranks) / _columns(scene))
    return TITLE_PX + CARD_PX * rows


def compose(page: "Page", scene: "Scene") -> "list[Plot]":
    """Put a card for each rank, or a strip for each number."""
    from nbdist.client.board.plots.cards import PLOT_PX, Card, SharedLimits

    if len(scene.ranks) > MOST_CARDS:
        return [_strips(page, scene)]
    columns = _columns(scene)
    width = (page.width - LEFT_PX - MARGIN_PX - (GAP_PX + LEFT_PX) * (columns - 1)) / columns
    shared = SharedLimits()
    page.write(MARGIN_PX, page.top + TITLE_PX / 2, "step time, ms, over the steps", size=TITLE_PT)
    plots: list[Plot] = []
    for index, rank in enumerate(scene.rows):
        row, column = divmod(index, columns)
        left = LEFT_PX + column * (width + GAP_PX + LEFT_PX)
        top = TITLE_PX + row * CARD_PX + WORDS_PX
        axes = page.axes(left, top, width, PLOT_PX)
        plots.append(Card(axes, page, rank, index, shared))
    return plots


def sentence(scene: "Scene") -> str:
    """Return how far and how fast the ranks are, the most memory, and who is silent."""
    if not scene.reporting:
        return "No rank has reported yet."
    text = f"{counted(len(scene.reporting), 'rank')} at step {scene.first_step:,}"
    if scene.last_step > scene.first_step:
        text += f" to {scene.last_step:,}"
    if scene.steps_per_s:
        text += f", {figure(scene.steps_per_s)} steps/s"
    memory = {row.rank: row.memory_bytes for row in scene.rows if row.memory_bytes}
    if memory:
        most = max(memory, key=memory.__getitem__)
        text += f"; most memory: {name_bytes(memory[most])} on rank {most}"
    quiet = [row.rank for row in scene.rows if row not in scene.reporting]
    return text + (f"; {name_ranks(quiet)} silent." if quiet else ".")


def table(scene: "Scene") -> ViewTable:
    """Return each rank's state, speed and memory."""
    head = ["rank", "device", "state", "step", "steps/s", "samples/s", "tokens/s", "memory"]
    has_cuda = any(row.cuda_bytes is not None for row in scene.rows)
    if has_cuda:
        head += ["device memory", "its peak"]
    rows = []
    for row in scene.rows:
        cells = [str(row.rank), row.device, scene.state(row), f"{row.step:,}"]
        cells += map(or_dash, (row.steps_per_s, row.samples_per_s, row.tokens_per_s))
        cells.append(or_dash(row.memory_bytes, name_bytes))
        if has_cuda:
            cells += [or_dash(row.cuda_bytes, name_bytes), or_dash(row.cuda_peak_bytes, name_bytes)]
        rows.append(tuple(cells))
    caption = "Ranks now" if scene.outcome is None else "Ranks at the end of the cell"
    return ViewTable(caption, tuple(head), tuple(rows))


def _strips(page: "Page", scene: "Scene") -> "Plot":
    from nbdist.client.board.plots.strips import Strip, StripsPlot

    names = _names(scene)

    def read(now: "Scene") -> list[Strip]:
        return [
            Strip(name, color, _column(now, get), write)
            for name, color, get, write in _NUMBERS
            if name in names
        ]

    width = page.width - STRIPS_LEFT_PX - STRIPS_WORDS_PX
    axes = page.axes(STRIPS_LEFT_PX, ABOVE_PX, width, STRIP_PX * max(1, len(names)))
    return StripsPlot(axes, page.theme, scene.ranks, names, read)


def _names(scene: "Scene") -> tuple[str, ...]:
    """Return the numbers that any rank has told."""
    return tuple(
        name for name, _, get, _ in _NUMBERS if any(get(row) is not None for row in scene.rows)
    )


def _column(scene: "Scene", get: Get) -> "Floats":
    import numpy as np

    values = [get(row) for row in scene.rows]
    return np.array([math.nan if value is None else value for value in values])


def _columns(scene: "Scene") -> int:
    return min(4, len(scene.ranks))
