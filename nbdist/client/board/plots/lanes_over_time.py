"""One number of many ranks over time: a lane a rank, filled as high as the value is on its scale.

All lanes have one scale, named below the title. A lane of a few pixels is still read: as a skyline,
beside its neighbours.
"""

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FixedLocator, FuncFormatter
from matplotlib.transforms import Transform

from nbdist.client.board.artists import draw, note, title
from nbdist.client.board.devices import QUANTITIES
from nbdist.client.board.measures import TEXT_PT
from nbdist.client.board.palette import Theme
from nbdist.client.board.plots.strips import Strip, extremes
from nbdist.client.board.scales import Floats, decimate
from nbdist.client.board.scene import Curve, Panel, Scene

FILLED, LIFT = 0.84, 0.42  # of a lane; how far below its middle it begins
MOST_WRITTEN = 16  # more lanes have no number each
WORDS_BELOW_PX, LIMITS_PX, TICK_PX = 34, 10, 60
_TICKS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 28_800)


class LanesOverTime:
    """One panel of `Scene.devices`; in a picture that stays, with the newest value a lane."""

    def __init__(
        self,
        axes: Axes,
        key: str,
        ranks: tuple[int, ...],
        theme: Theme,
        size_px: tuple[float, float],
        final: bool,
    ) -> None:
        self.axes, self._key, self._ranks = axes, key, ranks
        self._theme, self._final = theme, final
        width_px, self._height_px = size_px
        self._columns = max(40, int(width_px / 3))
        self._left = -22 / width_px  # where the ranks' numbers begin
        self._most_ticks = max(2, int(width_px / TICK_PX))
        self._end_s = self._top = 0.0
        self._artists: list[Artist] = []
        every = 1 << max(0, int(np.ceil(np.log2(len(ranks) / MOST_WRITTEN))))
        shown = range(0, len(ranks), every)
        axes.set_yticks(list(shown), [str(ranks[i]) for i in shown])
        axes.set_ylim(len(ranks) - 0.5, -0.5)
        axes.grid(False)
        self._limits = axes.text(
            0, 1 + LIMITS_PX / self._height_px, "", transform=axes.transAxes, color=theme.text,
            fontsize=TEXT_PT, va="center",
        )  # fmt: skip
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, place: name_time(value)))

    def fit(self, scene: Scene) -> bool:
        """Take in new data; return whether the axes have changed and must be redrawn."""
        panel = next(panel for panel in scene.devices if panel.key == self._key)
        last_s = max(float(line.x[-1]) for line in panel.lines)
        assert panel.top is not None  # devices' have one
        changed = panel.top != self._top or not 0.6 * self._end_s <= last_s <= self._end_s
        if changed:
            self._end_s = max(1.0, last_s if self._final else 1.5 * last_s)
            self._top = panel.top
            self._scale(panel)
        self._artists = [self._grounds(), self._skyline(panel)]
        if self._final:
            self._artists += self._words(panel)
        return changed

    def draw(self) -> None:
        """Draw the lanes."""
        draw(self._artists, self.axes)

    def _scale(self, panel: Panel) -> None:
        every_s = next((t for t in _TICKS_S if self._end_s / t <= self._most_ticks), 86_400)
        self.axes.set_xlim(0, self._end_s)
        self.axes.xaxis.set_major_locator(
            FixedLocator([*np.arange(0, self._end_s * 1.001, every_s)])
        )
        write = QUANTITIES[self._key].write
        low, high = f"{panel.floor or 0:.0f}", write(self._top)
        title(self.axes, panel.title, self._theme, pad=17)
        self._limits.set_text(f"{low} to {high}")

    def _skyline(self, panel: Panel) -> Artist:
        """Return all lanes as one path: an artist each would take longer than its points."""
        lanes = {rank: place for place, rank in enumerate(self._ranks)}
        corners, codes = [], []
        for line in panel.lines:
            if line.rank in lanes:
                outline = self._outline(line, lanes[line.rank] + LIFT, panel.floor or 0.0)
                corners.append(outline)
                codes += [Path.MOVETO, *[Path.LINETO] * (len(outline) - 2), Path.CLOSEPOLY]
        path = Path(np.concatenate(corners), codes) if corners else Path(np.zeros((0, 2)))
        return PathPatch(path, facecolor=QUANTITIES[self._key].color, linewidth=0)

    def _outline(self, line: Curve, base: float, floor: float) -> Floats:
        x, y = decimate(line.x, line.y, self._columns)
        if len(x) == 1:  # a second of it
            x, y = np.array([x[0], x[0] + 1]), np.array([y[0], y[0]])
        shares = np.clip((y - floor) / (self._top - floor), 0, 1)
        high = base - FILLED * shares
        # From the first moment to the last: of these, few are among the points that are left.
        first, last = line.x[0], max(line.x[-1], x[-1])
        edge_x = np.concatenate([[first, first], x, [last, last, first]])
        edge_y = np.concatenate([[base, high[0]], high, [high[-1], base, base]])
        outline: Floats = np.stack([edge_x, edge_y], axis=1)
        return outline

    def _grounds(self) -> Artist:
        """Return the base line of each lane: all that is seen of an idle one."""
        at = np.arange(len(self._ranks)) + LIFT
        ends = np.stack([np.stack([np.full(len(at), x), at], axis=1) for x in (0, self._end_s)], 1)
        path = Path(ends.reshape(-1, 2), [Path.MOVETO, Path.LINETO] * len(at))
        return PathPatch(path, edgecolor=self._theme.text, linewidth=0.4, alpha=0.6, fill=False)

    def _words(self, panel: Panel) -> list[Artist]:
        write = QUANTITIES[self._key].write
        newest = {line.rank: float(line.y[-1]) for line in panel.lines}
        if len(self._ranks) > MOST_WRITTEN:
            values = np.array([newest.get(rank, np.nan) for rank in self._ranks])
            words = extremes(self._ranks, Strip(panel.title, "", values, write))
            below = -WORDS_BELOW_PX / self._height_px
            return [self._word(self._left, below, words, self.axes.transAxes)]
        beside = self.axes.get_yaxis_transform()
        return [
            self._word(1.02, place, write(newest[rank]), beside)
            for place, rank in enumerate(self._ranks)
            if rank in newest
        ]

    def _word(self, x: float, y: float, words: str, transform: Transform) -> Artist:
        return note(x, y, words, self._theme, clip_on=False, transform=transform)


def name_time(seconds: float) -> str:
    """Return a label of the time axis: 0, 30 s, 5 min, 2 h."""
    if seconds == 0:
        return "0"
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"
