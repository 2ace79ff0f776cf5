"""Boxes that look like parts of a step: copied, in each frame, from pixels that were drawn once.

Agg prepares a hatch again for each path it draws (1 ms), and a frame has seven. Here each look is
drawn once over the whole plot; a frame copies what of it is inside boxes, whose edges lie between
pixels, where Agg rounds those of upright boxes, too.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray

from nbdist.client.board.artists import draw
from nbdist.client.board.scales import Floats

Boxes = tuple[Floats, Floats, Floats, Floats]  # left, right, low, high: one entry a box
Pixels = NDArray[np.uint8]


class Fills:
    """The looks of `patches`, opaque and without an outline, for axes that stay in their place."""

    def __init__(self, axes: Axes, patches: Sequence[Patch]) -> None:
        self._axes, self._patches = axes, patches
        self._looks: list[Pixels] = []

    def draw(self, boxes: Sequence[Boxes]) -> None:
        """Fill the boxes of each look, in coordinates of the axes' data."""
        page = self._page()
        # Two corners: the lower left and the upper right.
        (left, end), (right, top) = _places(self._axes.bbox.get_points(), len(page))
        plot = page[top:end, left:right]
        if not self._looks:
            before = plot.copy()
            self._looks = [self._drawn(patch, plot) for patch in self._patches]
            plot[:] = before

        # All of them at once: a transform takes longer than the copying.
        lefts, rights, lows, highs = (np.concatenate(ends) for ends in zip(*boxes, strict=True))
        corners = np.stack([[lefts, rights], [lows, highs]], axis=-1).reshape(-1, 2)
        at = _places(self._axes.transData.transform(corners), len(page))
        inside = np.clip(at, (left, top), (right, end)) - (left, top)
        begins, ends = np.sort(inside.reshape(2, -1, 2), axis=0).tolist()
        looks = [look for look, filled in zip(self._looks, boxes, strict=True) for _ in filled[0]]
        for look, (x0, y0), (x1, y1) in zip(looks, begins, ends, strict=True):
            plot[y0:y1, x0:x1] = look[y0:y1, x0:x1]

    def _drawn(self, patch: Patch, plot: Pixels) -> Pixels:
        whole = Rectangle((0, 0), 1, 1)
        whole.update_from(patch)
        whole.set_transform(self._axes.transAxes)
        draw([whole], self._axes)
        return plot.copy()

    def _page(self) -> Pixels:
        """Return the pixels of the canvas (height, width, RGBA), to be written."""
        canvas: Any = self._axes.get_figure(root=True).canvas  # type: ignore[union-attr]
        return np.asarray(canvas.buffer_rgba())


def _places(points: Floats, height: int) -> NDArray[np.intp]:
    """Return the (column, row) at whose beginning Agg puts points (N, 2); rows from the top."""
    flipped = np.stack([points[:, 0], height - points[:, 1]], axis=1)
    return np.floor(flipped + 0.5).astype(np.intp)
