import numpy as np
from matplotlib.axes import Axes

from nbdist.client.board import palette
from nbdist.client.board.artists import sample, title
from nbdist.client.board.page import Page


def page_with_two_axes() -> tuple[Page, list[Axes]]:
    page = Page(palette.theme_named("auto"), 500, 200, 1.0)
    both = [page.axes(left, 40, 170, 110) for left in (50, 300)]
    for axes in both:
        title(axes, "loss", page.theme)
    page.legend([sample("rank 0", palette.LINE_COLORS[0], ())], "left")
    return page, both


def test_a_page_whose_axes_moved_is_the_page_that_matplotlib_draws() -> None:
    page, (left, right) = page_with_two_axes()
    page.draw([left, right])
    left.set_xlim(0, 400)
    page.draw([left])
    right.set_ylim(-3, 7)

    page.draw([right])

    drawn = page.pixels.copy()
    page.canvas.draw()
    assert (page.pixels == drawn).all()


def test_axes_that_have_not_moved_are_not_drawn_again() -> None:
    page, (left, right) = page_with_two_axes()
    page.draw([])
    before = page.pixels.copy()
    for axes in (left, right):
        axes.set_xlim(0, 400)

    page.draw([left])

    changed = np.flatnonzero((page.pixels != before).any(axis=(0, 2)))
    assert len(changed)
    assert changed.max() < 250
