"""Draw a `Scene` into a PNG, fast enough for a few frames a second.

Axes, ticks and titles are drawn once and kept as pixels; a frame restores them and draws only the
lines and bars upon them (blitting), from decimated data, and is written with the colours of
colors.py. Axes are redrawn when a limit must change, which is why limits grow by a quarter.

matplotlib's `Figure` and Agg canvas, never pyplot: its global state is not for threads. A
`Painter` belongs to one thread at a time. Importing this module loads matplotlib (0.2 s).
"""

from nbdist.client.board.colors import png
from nbdist.client.board.measures import WIDE, wrapped
from nbdist.client.board.page import Page, Pixels, Plot
from nbdist.client.board.palette import Theme
from nbdist.client.board.scene import Scene
from nbdist.client.board.text import length
from nbdist.client.board.verdict_block import headline
from nbdist.client.board.views import VIEWS
from nbdist.shared.text import figure


class Painter:
    """Draws the frames of one board.

    Args:
        theme: Colours of text and background.
        width: CSS pixels. The height follows from what there is to see.
        scale: Pixels of the PNG for one CSS pixel; 2 is sharp on any screen.
        name: Which of the board's views to draw, one of `board.VIEWS`.
        final: Fit the axes tightly and write figures on the plots, for a picture that stays.
        smoothing: How many steps a loss' running mean takes; None chooses by their number.
    """

    def __init__(
        self,
        theme: Theme,
        width: int = WIDE,
        scale: float = 1.0,
        *,
        name: str = "overview",
        final: bool = False,
        smoothing: int | None = None,
    ) -> None:
        self.theme, self.width, self.scale, self.final = theme, width, scale, final
        self._smoothing = smoothing
        self.redraws = 0  # how often axes were redrawn; for tests and the benchmark
        self._view = VIEWS[name]
        self._plan: tuple[object, ...] | None = None
        self._pixels: Pixels | None = None
        self._plots: list[Plot] = []
        self._page: Page | None = None

    @property
    def height(self) -> int:
        """Return the height of the last frame in CSS pixels."""
        assert self._page is not None  # a frame was drawn
        return self._page.height

    def frame(self, scene: Scene) -> bytes:
        """Return a PNG of `scene`."""
        head = self._head(scene) if self.final else ()
        plan = (*self._view.plan(scene, self.final), *head)
        if plan != self._plan or self._page is None:
            height = self._view.height(scene, self.final, self.width)
            self._page = Page(self.theme, self.width, height, self.scale, head)
            self._page.smoothing = self._smoothing
            self._plots = self._view.compose(self._page, scene)
            self._plan, self._pixels = plan, None
        moved = [plot.fit(scene) for plot in self._plots]
        if any(moved) or self._pixels is None:
            self._page.draw([p.axes for p, has in zip(self._plots, moved, strict=True) if has])
            self._pixels = self._page.pixels.copy()
            self.redraws += 1
        self._page.pixels[:] = self._pixels
        for plot in self._plots:
            plot.draw()
        return png(self._page.pixels, self.theme, small=self.final)

    def _head(self, scene: Scene) -> tuple[str, ...]:
        """Return the head of a picture: how long, how fast, and in short who slows others."""
        parts = [length(scene)]
        if scene.steps_per_s:
            parts.append(f"{figure(scene.steps_per_s)} steps/s")
        plotted = {panel.key for panel in scene.panels}
        for key in sorted({key for row in scene.rows for key in row.own} - plotted)[:2]:
            values = [row.own[key] for row in scene.rows if key in row.own]
            parts.append(f"{key} {figure(sum(values) / len(values))}")
        if found := headline(scene.analysis.verdicts):
            parts.append(found)
        return tuple(wrapped("   ·   ".join(parts), self.width))
