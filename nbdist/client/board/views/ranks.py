"""Each rank: what it is, how fast, how much memory, and the time of its steps.

A small multiple for each rank; more than `MOST_CARDS` are strips, with the extremes named.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from nbdist.client.board import palette
from nbdist.client.board.artists import TEXT_PT, TITLE_PT, draw, note, path
from nbdist.client.board.page import MARGIN_PX, Page, Plot
from nbdist.client.board.scales import Floats, Limits, bulk_limits, decimate, grown, padded
from nbdist.client.board.scene import Row, Scene
from nbdist.client.board.strips import Strip, StripsPlot
from nbdist.client.board.text import figure, size

MOST_CARDS = 16
CARD_PX, WORDS_PX, GAP_PX = 138, 58, 26
TITLE_PX, PLOT_PX = 24, 56
LEFT_PX = 34
STRIP_PX, STRIPS_LEFT_PX, STRIPS_WORDS_PX, ABOVE_PX, BELOW_PX = 36, 96, 258, 12, 36

Get = Callable[[Row], float | None]
Write = Callable[[float], str]

# Name, colour, what is read of a row, how it is written.
_NUMBERS: tuple[tuple[str, str, Get, Write], ...] = (
    ("steps/s", palette.LINE_COLORS[0], lambda row: row.steps_per_s, figure),
    ("samples/s", palette.LINE_COLORS[5], lambda row: row.samples_per_s, figure),
    ("tokens/s", palette.LINE_COLORS[2], lambda row: row.tokens_per_s, figure),
    ("memory", palette.LINE_COLORS[1], lambda row: row.memory_bytes, size),
    ("device memory", palette.LINE_COLORS[3], lambda row: row.cuda_bytes, size),
    ("its peak", palette.LINE_COLORS[3], lambda row: row.cuda_peak_bytes, size),
)


def plan(scene: Scene, final: bool) -> tuple[object, ...]:
    """Return the ranks; for strips, also what is known of them."""
    return scene.ranks, _names(scene) if len(scene.ranks) > MOST_CARDS else ()


def height(scene: Scene, final: bool) -> int:
    """Return the height of the page."""
    if len(scene.ranks) > MOST_CARDS:
        return ABOVE_PX + STRIP_PX * max(1, len(_names(scene))) + BELOW_PX
    rows = math.ceil(len(scene.ranks) / _columns(scene))
    return TITLE_PX + CARD_PX * rows


def compose(page: Page, scene: Scene) -> list[Plot]:
    """Put a card for each rank, or a strip for each number."""
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


class SharedLimits:
    """What the cards have in common, so that they compare: one scale of milliseconds."""

    def __init__(self) -> None:
        self._y: Limits = (0.0, 0.0)
        self._scene: Scene | None = None

    def of(self, scene: Scene) -> Limits:
        """Return the limits for all cards of this frame."""
        if scene is self._scene:
            return self._y
        lines = [] if scene.paces is None else [line.y for line in scene.paces.lines]
        needed = bulk_limits(lines, 0.0)
        shown = None if self._scene is None else self._y
        self._y = grown(shown, padded(needed, 0.0) if needed else (0.0, 1.0))
        self._scene = scene
        return self._y


class Card:
    """One rank: the time of its steps, under its numbers in a picture that stays.

    While a cell runs, the table below tells them: a text costs 2 ms to draw.
    """

    def __init__(
        self, axes: Axes, page: Page, row: Row, place: int, shared: "SharedLimits"
    ) -> None:
        self._axes, self._theme, self._final = axes, page.theme, page.is_final
        self._rank, self._shared = row.rank, shared
        self._color, _ = palette.line_style(place)
        self._columns = max(40, int(page.width * page.scale) // 12)
        self._y: Limits | None = None
        self._artists: list[Artist] = []
        axes.set_xticks([])
        axes.set_xlim(0, 1)
        axes.text(
            0.0, 1 + 42 / PLOT_PX, f"rank {row.rank}  {row.device}", fontsize=TEXT_PT, va="center",
            transform=axes.transAxes, color=page.theme.text, fontweight="bold",
        )  # fmt: skip
        axes.tick_params(labelsize=TEXT_PT)

    def fit(self, scene: Scene) -> bool:
        """Take in new data; return whether the axes have changed and must be drawn anew."""
        row = next(row for row in scene.rows if row.rank == self._rank)
        y = self._shared.of(scene)
        changed = y != self._y
        if changed:
            self._y = y
            self._axes.set_ylim(*y)
            self._axes.set_yticks([0, _round_below(y[1])])
        self._artists = self._words(scene, row) if self._final else []
        lines = () if scene.paces is None else scene.paces.lines
        for line in lines:
            if line.rank == self._rank:
                at, values = decimate(line.x, line.y, self._columns)
                # From edge to edge, whatever their number, so that axes are not drawn anew.
                share = (at - at[0]) / max(float(at[-1] - at[0]), 1.0)
                drawn = path(share, values, self._color, (), 1.2, 1.0)
                drawn.set_marker("o" if len(at) == 1 else "")
                self._artists.append(drawn)
        return changed

    def draw(self) -> None:
        """Draw words and line."""
        draw(self._artists, self._axes)

    def _words(self, scene: Scene, row: Row) -> list[Artist]:
        state = [scene.state(row)] + ([f"step {row.step:,}"] if row.step else [])
        pace = [f"{figure(row.steps_per_s)} steps/s"] if row.steps_per_s else []
        if row.tokens_per_s:
            pace.append(f"{figure(row.tokens_per_s)} tokens/s")
        elif row.samples_per_s:
            pace.append(f"{figure(row.samples_per_s)} samples/s")
        memory = [size(row.memory_bytes)] if row.memory_bytes is not None else []
        if row.cuda_bytes is not None:
            memory.append(f"{size(row.cuda_bytes)} on the device")
        return [
            self._word(1.0, 42, "  ".join(state), ha="right"),
            self._word(0.0, 26, "  ".join(pace)),
            self._word(0.0, 10, "  ".join(memory)),
        ]

    def _word(self, x: float, above_px: float, words: str, **options: Any) -> Artist:
        """Return words so many CSS pixels above the line's plot."""
        y = 1 + above_px / PLOT_PX
        return note(
            x, y, words, self._theme, transform=self._axes.transAxes, clip_on=False, **options
        )


def _strips(page: Page, scene: Scene) -> Plot:
    names = _names(scene)

    def read(now: Scene) -> list[Strip]:
        return [
            Strip(name, color, _column(now, get), write)
            for name, color, get, write in _NUMBERS
            if name in names
        ]

    width = page.width - STRIPS_LEFT_PX - STRIPS_WORDS_PX
    axes = page.axes(STRIPS_LEFT_PX, ABOVE_PX, width, STRIP_PX * max(1, len(names)))
    return StripsPlot(axes, page.theme, scene.ranks, names, read)


def _names(scene: Scene) -> tuple[str, ...]:
    """Return the numbers that any rank has told."""
    return tuple(
        name for name, _, get, _ in _NUMBERS if any(get(row) is not None for row in scene.rows)
    )


def _column(scene: Scene, get: Get) -> Floats:
    values = [get(row) for row in scene.rows]
    return np.array([math.nan if value is None else value for value in values])


def _columns(scene: Scene) -> int:
    return min(4, len(scene.ranks))


def _round_below(value: float) -> float:
    """Return a round number that is seen below `value`."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * lead for lead in (5, 2, 1) if power * lead <= value)
