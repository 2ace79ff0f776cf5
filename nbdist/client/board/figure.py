"""Draw a `Scene` into a PNG.

matplotlib's `Figure` and Agg canvas, never pyplot: its global state is not for threads. Any thread
may draw. Importing this module loads matplotlib (0.2 s).
"""

from PIL import Image

from nbdist.client.board.drawn.measures import WIDE, wrapped
from nbdist.client.board.drawn.page import Page
from nbdist.client.board.drawn.picture import few_colors
from nbdist.client.board.palette import Theme
from nbdist.client.board.scene.scene import Scene
from nbdist.client.board.text import emulated, length
from nbdist.client.board.verdict_block import headline
from nbdist.client.board.views import VIEWS
from nbdist.shared.text import figure


def draw(
    scene: Scene, theme: Theme, width: int = WIDE, scale: float = 1.0, *, name: str = "overview"
) -> bytes:
    """Return a PNG of `scene`; the arguments are those of `compose`."""
    pixels = compose(scene, theme, width, scale, name=name).pixels()
    return few_colors(Image.fromarray(pixels), theme)


def compose(
    scene: Scene, theme: Theme, width: int = WIDE, scale: float = 1.0, *, name: str = "overview"
) -> Page:
    """Return the page of a view.

    Args:
        scene: What there is to see.
        theme: Colours of text and background.
        width: CSS pixels. The height follows from what there is to see.
        scale: Pixels of the PNG for one CSS pixel; 2 is sharp on any screen.
        name: One of `board.VIEWS`.
    """
    view = VIEWS[name]
    page = Page(theme, width, view.height(scene, width), scale, _head(scene, width))
    view.compose(page, scene)
    return page


def _head(scene: Scene, width: int) -> list[str]:
    """Return how long, how fast, and in short who slows others."""
    parts = [length(scene)]
    if scene.steps_per_s:
        parts.append(f"{figure(scene.steps_per_s)} steps/s")
    plotted = {panel.key for panel in scene.panels}
    for key in sorted({key for row in scene.rows for key in row.own} - plotted)[:2]:
        values = [row.own[key] for row in scene.rows if key in row.own]
        parts.append(f"{key} {figure(sum(values) / len(values))}")
    if found := headline(scene.analysis.verdicts):
        parts.append(found)
    if scene.emulated:
        parts.append(emulated(scene))
    return wrapped("   ·   ".join(parts), width)
