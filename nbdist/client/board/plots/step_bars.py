"""Where a step's time goes: a lying bar of its parts for each rank, and for whom it waits."""

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from nbdist.client.board.artists import draw, note, part_patch, title
from nbdist.client.board.measures import TEXT_PT
from nbdist.client.board.palette import Theme
from nbdist.client.board.plots.fills import Boxes, Fills
from nbdist.client.board.scales import Floats, Limits, grown
from nbdist.client.board.scene import Scene, Stack
from nbdist.shared.text import figure

HALF = 0.36  # of a bar's height, in ranks
MOST_WORDS = 4  # beside bars of a live view, 2 ms each: the table below it has them all


class LyingBars:
    """One stacked bar a rank, the first on top; its length and its wait in words behind it."""

    def __init__(self, axes: Axes, theme: Theme, stack: Stack, final: bool) -> None:
        self.axes, self._theme, self._final = axes, theme, final
        self._x: Limits | None = None
        self._artists: list[Artist] = []
        count = len(stack.ranks)
        self._boxes: list[Boxes] = []
        self._fills = Fills(axes, [part_patch(name, theme, count) for name in stack.parts])
        title(axes, "step time, ms", theme)
        axes.set_ylim(count - 0.5, -0.5)
        axes.set_yticks(range(count), [f"rank {rank}" for rank in stack.ranks])
        axes.grid(False)
        axes.grid(axis="x", color=theme.text, alpha=0.22, linewidth=0.6)

    def fit(self, scene: Scene) -> bool:
        """Take in new data; return whether the axes have changed and must be redrawn."""
        stack = scene.stack
        assert stack is not None  # it is why there is this plot
        whole = stack.whole_ms
        top = float(whole.max())
        x = (0.0, top * 1.02 if top > 0 else 1.0)
        if not self._final:
            x = grown(self._x, x)
        changed = x != self._x
        if changed:
            self._x = x
            self.axes.set_xlim(*x)
        at = np.arange(len(stack.ranks), dtype=np.float64)
        base: Floats = np.zeros(len(stack.ranks))
        self._artists, self._boxes = [], []
        for length in stack.parts.values():
            self._boxes.append((base, base + length, at + HALF, at - HALF))  # the first on top
            base = base + length
        if self._final or len(stack.ranks) <= MOST_WORDS:
            self._artists += [
                self._words(place, float(whole[place]), stack.waits_for.get(rank))
                for place, rank in enumerate(stack.ranks)
            ]
        return changed

    def draw(self) -> None:
        """Draw the bars."""
        self._fills.draw(self._boxes)
        draw(self._artists, self.axes)

    def _words(self, place: int, whole_ms: float, waits: tuple[int, float] | None) -> Artist:
        words = f"{figure(whole_ms)} ms"
        if waits is not None:
            words += f", waits {figure(waits[1])} ms for rank {waits[0]}"
        return note(
            1.01, place, words, self._theme, transform=self.axes.get_yaxis_transform(),
            clip_on=False, fontsize=TEXT_PT,
        )  # fmt: skip
