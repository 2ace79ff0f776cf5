"""What `Fills` copies must be what matplotlib draws."""

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch

from nbdist.client.board import palette
from nbdist.client.board.artists import draw, part_patch, rectangles
from nbdist.client.board.page import Page
from nbdist.client.board.plots.fills import Boxes, Fills

PARTS = "compute", "waiting", "transfer"


def page_and_axes(scale: float) -> tuple[Page, Axes]:
    page = Page(palette.theme_named("auto"), 300, 200, scale)
    axes = page.axes(31, 17, 201.5, 123.25)
    axes.set_xlim(-0.6, 7.6)
    axes.set_ylim(0, 15.3)
    page.canvas.draw()
    return page, axes


def boxes_of(seed: int) -> list[Boxes]:
    draws = np.random.default_rng(seed)
    at, base, found = np.arange(8.0), np.zeros(8), []
    for _ in PARTS:
        height = draws.uniform(0, 7, 8)  # the highest stacks leave the plot
        found.append((at - 0.36, at + 0.36, base, base + height))
        base = base + height
    return found


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_boxes_are_the_pixels_that_matplotlib_draws(scale: float) -> None:
    theme = palette.theme_named("auto")
    looks = [part_patch(part, theme, 8) for part in PARTS]
    drawn, drawn_axes = page_and_axes(scale)
    copied, copied_axes = page_and_axes(scale)
    boxes = boxes_of(3)

    for look, box in zip(looks, boxes, strict=True):
        patch = PathPatch(rectangles(*box))
        patch.update_from(look)
        draw([patch], drawn_axes)
    Fills(copied_axes, looks).draw(boxes)

    expected = np.asarray(drawn.canvas.buffer_rgba())
    assert (expected == np.asarray(copied.canvas.buffer_rgba())).all()
    assert (expected[..., 3] == 255).mean() > 0.1


def test_looks_are_not_left_in_a_plot_without_boxes() -> None:
    page, axes = page_and_axes(1.0)
    before = np.asarray(page.canvas.buffer_rgba()).copy()
    nothing = (np.empty(0),) * 4

    Fills(axes, [part_patch("waiting", palette.theme_named("auto"), 2)]).draw([nothing])

    assert (np.asarray(page.canvas.buffer_rgba()) == before).all()
