import numpy as np
import pytest
from matplotlib.lines import Line2D

from nbdist.client.board import palette
from nbdist.client.board.artists import draw, pen
from nbdist.client.board.page import Page


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("dashes", palette.LINE_DASHES)
def test_a_pen_draws_what_matplotlib_draws(dashes: tuple[float, ...], scale: float) -> None:
    x = np.linspace(0, 1, 300)
    y = 0.5 + 0.4 * np.sin(9 * x)
    y[40:60] = np.nan
    plain = Line2D([], [], color="#ff5e02", linewidth=1.6, alpha=0.7, solid_capstyle="round")
    if dashes:
        plain.set_dashes(dashes)
    pages = []
    for line in (plain, pen("#ff5e02", dashes, 1.6, 0.7)):
        page = Page(palette.theme_named("light"), 300, 200, scale)
        axes = page.axes(30, 20, 240, 150)
        page.canvas.draw()
        before = np.asarray(page.canvas.buffer_rgba()).copy()
        for height in (1.0, 0.5):  # again with other data
            line.set_data(x, y * height)
            draw([line], axes)
        pages.append(np.asarray(page.canvas.buffer_rgba()))
        assert (pages[-1] != before).any()

    assert np.abs(pages[0].astype(int) - pages[1]).max() <= 1
