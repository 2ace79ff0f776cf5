"""One rank in a card: the time of its steps, and what is known of it in words."""

import math
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes

from nbdist.client.board import palette
from nbdist.client.board.artists import draw, note, path
from nbdist.client.board.measures import TEXT_PT
from nbdist.client.board.page import Page
from nbdist.client.board.scales import Limits, bulk_limits, decimate, grown, padded
from nbdist.client.board.scene import Row, Scene
from nbdist.shared.text import figure, name_bytes

PLOT_PX = 56


class SharedLimits:
    """The scale of milliseconds that cards share, so that they can be compared."""

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

    While a cell runs, the table below shows them: a text costs 2 ms to draw.
    """

    def __init__(
        self, axes: Axes, page: Page, row: Row, place: int, shared: "SharedLimits"
    ) -> None:
        self.axes, self._theme, self._final = axes, page.theme, page.is_final
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
        """Take in new data; return whether the axes have changed and must be redrawn."""
        row = next(row for row in scene.rows if row.rank == self._rank)
        y = self._shared.of(scene)
        changed = y != self._y
        if changed:
            self._y = y
            self.axes.set_ylim(*y)
            self.axes.set_yticks([0, _round_below(y[1])])
        self._artists = self._words(scene, row) if self._final else []
        lines = () if scene.paces is None else scene.paces.lines
        for line in lines:
            if line.rank == self._rank:
                at, values = decimate(line.x, line.y, self._columns)
                # From edge to edge, whatever their number, so that axes are not redrawn.
                share = (at - at[0]) / max(float(at[-1] - at[0]), 1.0)
                drawn = path(share, values, self._color, (), 1.2, 1.0)
                drawn.set_marker("o" if len(at) == 1 else "")
                self._artists.append(drawn)
        return changed

    def draw(self) -> None:
        """Draw words and line."""
        draw(self._artists, self.axes)

    def _words(self, scene: Scene, row: Row) -> list[Artist]:
        state = [scene.state(row)] + ([f"step {row.step:,}"] if row.step else [])
        pace = [f"{figure(row.steps_per_s)} steps/s"] if row.steps_per_s else []
        if row.tokens_per_s:
            pace.append(f"{figure(row.tokens_per_s)} tokens/s")
        elif row.samples_per_s:
            pace.append(f"{figure(row.samples_per_s)} samples/s")
        memory = [name_bytes(row.memory_bytes)] if row.memory_bytes is not None else []
        if row.cuda_bytes is not None:
            memory.append(f"{name_bytes(row.cuda_bytes)} on the device")
        return [
            self._word(1.0, 42, "  ".join(state), ha="right"),
            self._word(0.0, 26, "  ".join(pace)),
            self._word(0.0, 10, "  ".join(memory)),
        ]

    def _word(self, x: float, above_px: float, words: str, **options: Any) -> Artist:
        """Return words so many CSS pixels above the line's plot."""
        y = 1 + above_px / PLOT_PX
        return note(
            x, y, words, self._theme, transform=self.axes.transAxes, clip_on=False, **options
        )


def _round_below(value: float) -> float:
    """Return a round number that is seen below `value`."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * lead for lead in (5, 2, 1) if power * lead <= value)
