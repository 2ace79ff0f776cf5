"""Where a step's time goes: a lying bar of its parts for each rank, and for whom it waits."""

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch

from nbdist.client.board.artists import draw, note, part_patch, rectangles, title
from nbdist.client.board.measures import TEXT_PT
from nbdist.client.board.palette import Theme
from nbdist.client.board.scales import Floats, Limits, grown
from nbdist.client.board.scene import Scene, Stack
from nbdist.formatting import figure

MOST_WORDS = 4  # beside bars of a live view, 2 ms each: the table below it has them all


class LyingBars:
    """One stacked bar a rank, the first on top; its length and its wait in words behind it."""

    def __init__(self, axes: Axes, theme: Theme, stack: Stack, final: bool) -> None:
        self._axes, self._theme, self._final = axes, theme, final
        self._x: Limits | None = None
        self._artists: list[Artist] = []
        count = len(stack.ranks)
        self._patches = [part_patch(name, theme, count) for name in stack.parts]
        title(axes, "step time, ms", theme)
        axes.set_ylim(count - 0.5, -0.5)
        axes.set_yticks(range(count), [f"rank {rank}" for rank in stack.ranks])
        axes.grid(False)
        axes.grid(axis="x", color=theme.text, alpha=0.22, linewidth=0.6)

    def fit(self, scene: Scene) -> bool:
        """Take in new data; return whether the axes have changed and must be drawn anew."""
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
            self._axes.set_xlim(*x)
        at = np.arange(len(stack.ranks), dtype=np.float64)
        base: Floats = np.zeros(len(stack.ranks))
        self._artists = []
        for patch, length in zip(self._patches, stack.parts.values(), strict=True):
            if length.any():  # Agg prepares a hatch for each path it draws (2 ms)
                seen = length > 0
                where = at[seen]
                bars = PathPatch(
                    rectangles(base[seen], (base + length)[seen], where - 0.36, where + 0.36)
                )
                bars.update_from(patch)
                self._artists.append(bars)
            base = base + length
        if self._final or len(stack.ranks) <= MOST_WORDS:
            self._artists += [
                self._words(place, float(whole[place]), stack.waits_for.get(rank))
                for place, rank in enumerate(stack.ranks)
            ]
        return changed

    def draw(self) -> None:
        """Draw the bars."""
        draw(self._artists, self._axes)

    def _words(self, place: int, whole_ms: float, waits: tuple[int, float] | None) -> Artist:
        words = f"{figure(whole_ms)} ms"
        if waits is not None:
            words += f", waits {figure(waits[1])} ms for rank {waits[0]}"
        return note(
            1.01, place, words, self._theme, transform=self._axes.get_yaxis_transform(),
            clip_on=False, fontsize=TEXT_PT,
        )  # fmt: skip
