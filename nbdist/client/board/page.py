"""The figure that one view of the board is composed on: axes and legends at CSS pixels.

Places are counted from the top left, as people look. The head, which only a picture that stays
has, takes the first of them; a view begins at `top`.
"""

from collections.abc import Collection, Sequence
from typing import Literal, Protocol

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from nbdist.client.board.measures import (
    HEAD_PX,
    LINE_PX,
    MARGIN_PX,
    RIGHT_PX,
    TEXT_PT,
    TITLE_PT,
    legend_columns,
    legend_rows,
)
from nbdist.client.board.palette import Theme
from nbdist.client.board.scene import Scene
from nbdist.client.board.text import tick

Pixels = NDArray[np.uint8]


class Plot(Protocol):
    """The parts of a view.

    Attributes:
        axes: Those it draws upon, and no other plot.
    """

    axes: Axes

    def fit(self, scene: Scene) -> bool:
        """Take in new data; return whether the axes have changed and must be redrawn."""

    def draw(self) -> None:
        """Draw the data, upon axes that are pixels already."""


class Page:
    """An empty figure.

    Args:
        theme: Colours of text and background.
        width: CSS pixels.
        height: CSS pixels below the head.
        scale: Pixels for one CSS pixel.
        head: Lines over the view; empty while a cell runs.
    """

    def __init__(
        self, theme: Theme, width: int, height: int, scale: float, head: Sequence[str] = ()
    ) -> None:
        self.theme, self.width, self.scale, self.is_final = theme, width, scale, bool(head)
        self.smoothing: int | None = None  # of a loss' running mean, in steps; None chooses
        self._words: Pixels | None = None  # all but the axes
        self._drawn: dict[Axes, tuple[tuple[NDArray[np.intp], ...], Pixels]] = {}  # where, and what
        self.top = HEAD_PX + LINE_PX * (len(head) - 1) if head else 0
        self.height = self.top + height
        self.figure = Figure(
            figsize=(width / 100, self.height / 100),
            dpi=100 * scale,
            facecolor=theme.background or "none",
        )
        self.canvas = FigureCanvasAgg(self.figure)
        for place, line in enumerate(head):
            self.write(MARGIN_PX, 17 + LINE_PX * place, line, size=TITLE_PT)

    def draw(self, moved: Collection[Axes]) -> None:
        """Draw the page as it is without data; what was drawn before is kept but for `moved` axes.

        Axes are drawn each by itself upon the page's words, which are half of the work, and what
        differs from these is its own: no two overlap.
        """
        if self._words is None:
            for axes in self.figure.axes:
                axes.set_visible(False)
            self.canvas.draw()  # type: ignore[no-untyped-call]
            for axes in self.figure.axes:
                axes.set_visible(True)
            self._words = self.pixels.copy()
        for axes in self.figure.axes:
            if axes in moved or axes not in self._drawn:
                self.pixels[:] = self._words
                self.figure.draw_artist(axes)
                at = np.nonzero((self.pixels.view("u4") != self._words.view("u4"))[..., 0])
                self._drawn[axes] = at, self.pixels[at]
        self.pixels[:] = self._words
        for at, pixels in self._drawn.values():
            self.pixels[at] = pixels

    @property
    def pixels(self) -> Pixels:
        """Return the canvas' pixels (height, width, RGBA), to be read and written."""
        return np.asarray(self.canvas.buffer_rgba())  # type: ignore[no-untyped-call]

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Return axes whose plot takes this place; `top` counts from below the head."""
        bottom = self.height - self.top - top - height
        axes = self.figure.add_axes(
            (left / self.width, bottom / self.height, width / self.width, height / self.height)
        )
        axes.set_facecolor("none")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(self.theme.text)
        axes.spines["bottom"].set_alpha(0.6)
        axes.tick_params(colors=self.theme.text, labelsize=TEXT_PT, length=0, pad=4)
        axes.grid(axis="y", color=self.theme.text, alpha=0.22, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(tick))
        return axes

    def legend(
        self, handles: Sequence[Artist], side: Literal["left", "right"], below: float = 0
    ) -> None:
        """Write samples, in as many lines as they need, this far below the head."""
        labels = [str(handle.get_label()) for handle in handles]
        rows = legend_rows(labels, self.width)
        middle = below + 13 + LINE_PX * (rows - 1) / 2
        x = MARGIN_PX / self.width if side == "left" else 1 - RIGHT_PX / self.width
        legend = self.figure.legend(
            handles=handles,
            loc="center left" if side == "left" else "center right",
            bbox_to_anchor=(x, 1 - (self.top + middle) / self.height),
            ncols=legend_columns(labels, self.width),
            frameon=False,
            fontsize=TEXT_PT,
            handlelength=2.2 if side == "left" else 1.1,
            handleheight=0.9,
            handletextpad=0.5,
            columnspacing=1.2,
            borderpad=0,
            borderaxespad=0,
        )
        for text in legend.get_texts():
            text.set_color(self.theme.text)

    def write(self, left: float, middle: float, words: str, *, size: float = TEXT_PT) -> None:
        """Write a line whose middle is this far below the figure's top."""
        self.figure.text(
            left / self.width, 1 - middle / self.height, words, va="center", fontsize=size,
            color=self.theme.text,
        )  # fmt: skip

    def swatch(self, left: float, middle: float, color: str) -> None:
        """Write a small square of `color`."""
        self.figure.text(
            left / self.width, 1 - middle / self.height, "\u25a0", va="center_baseline",
            fontsize=TITLE_PT, color=color,
        )  # fmt: skip
