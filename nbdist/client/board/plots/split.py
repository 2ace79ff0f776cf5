"""Where a recent step's time goes: one stacked bar a rank."""

import math

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.text import Text

from nbdist.client.board import palette
from nbdist.client.board.artists import draw, part_patch, title
from nbdist.client.board.measures import TEXT_PT
from nbdist.client.board.palette import Theme
from nbdist.client.board.plots.fills import Boxes, Fills
from nbdist.client.board.scales import Limits, grown
from nbdist.client.board.scene import Scene, Stack
from nbdist.shared.text import figure

HALF = 0.36  # of a bar's width, in ranks


class SplitPlot:
    """The bars, of the same parts as those of the view `step`."""

    def __init__(self, axes: Axes, theme: Theme, stack: Stack, final: bool) -> None:
        self.axes, self._theme, self._final = axes, theme, final
        self._ranks: tuple[int, ...] = ()
        self._y: Limits | None = None
        self._artists: list[Artist] = []
        self._boxes: list[Boxes] = []
        parts = [part_patch(name, theme, len(stack.ranks)) for name in stack.parts]
        self._fills = Fills(axes, parts)
        title(axes, "step time, ms", theme)
        axes.set_xlabel("rank", color=theme.text, fontsize=TEXT_PT, labelpad=1)

    def fit(self, scene: Scene) -> bool:
        """Take in new data; return whether the axes have changed and must be redrawn."""
        stack = scene.stack
        assert stack is not None  # it is why there is this plot
        top = float(stack.whole_ms.max())
        y = (0.0, top * 1.12 if top > 0 else 1.0)
        if not self._final:
            y = grown(self._y, y)
        changed = stack.ranks != self._ranks or y != self._y
        if changed:
            self._show_ranks(stack.ranks)
            self._y = y
            self.axes.set_ylim(*y)
        base = np.zeros(len(stack.ranks))
        at = np.arange(len(stack.ranks), dtype=np.float64)
        self._artists, self._boxes = [], []
        for height in stack.parts.values():
            self._boxes.append((at - HALF, at + HALF, base, base + height))
            base = base + height
        if self._final and len(stack.ranks) <= palette.MANY:
            self._artists += [self._figure_over(x, h) for x, h in zip(at, base, strict=True)]
        return changed

    def draw(self) -> None:
        """Draw the bars."""
        self._fills.draw(self._boxes)
        draw(self._artists, self.axes)

    def _show_ranks(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        every = 1 << max(0, math.ceil(math.log2(len(ranks) / 12)))
        shown = range(0, len(ranks), every)
        self.axes.set_xticks(list(shown), [str(ranks[i]) for i in shown])
        # Air on both sides keeps two bars from looking like two walls.
        air = 0.6 if len(ranks) > 3 else 0.9
        self.axes.set_xlim(-air, len(ranks) - 1 + air)

    def _figure_over(self, x: float, height: float) -> Artist:
        return Text(
            x, height, figure(height), color=self._theme.text, fontsize=TEXT_PT, ha="center",
            va="bottom",
        )  # fmt: skip
