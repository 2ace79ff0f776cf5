"""The figure that one view of the board is composed on: axes and legends at CSS pixels.

Places are counted from the top left, as people look. A view begins below the head, at `top`.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from nbdist.client.board.drawn.measures import (
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
from nbdist.client.board.text import tick


class Page:
    """An empty figure.

    Args:
        theme: Colours of text and background.
        width: CSS pixels.
        height: CSS pixels below the head.
        scale: Pixels for one CSS pixel.
        head: Lines over the view.
    """

    def __init__(
        self, theme: Theme, width: int, height: int, scale: float, head: Sequence[str]
    ) -> None:
        self.theme, self.width, self.scale = theme, width, scale
        self.top = HEAD_PX + LINE_PX * (len(head) - 1)
        self.height = self.top + height
        self.figure = Figure(
            figsize=(width / 100, self.height / 100),
            dpi=100 * scale,
            facecolor=theme.background or "none",
        )
        self.canvas = FigureCanvasAgg(self.figure)
        for place, line in enumerate(head):
            self.write(MARGIN_PX, 17 + LINE_PX * place, line, size=TITLE_PT)

    def pixels(self) -> NDArray[np.uint8]:
        """Return what is on it: (height, width, RGBA)."""
        self.canvas.draw()  # type: ignore[no-untyped-call]
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
