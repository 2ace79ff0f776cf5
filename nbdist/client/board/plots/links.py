"""How fast links are: a bar for each link, by the rank that sends; the slow ones marked."""

import math
from collections.abc import Mapping
from statistics import median_high

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.ticker import FuncFormatter, NullLocator

from nbdist.client.board import palette
from nbdist.client.board.artists import draw, note, rectangles, title
from nbdist.client.board.palette import Theme
from nbdist.client.board.scales import Floats, Limits
from nbdist.client.board.scene import Scene
from nbdist.shared.text import name_rate

Link = tuple[int, int]  # from rank, to rank
Rates = Mapping[Link, float]  # bytes per second

SLOWER = 0.5  # of the others' median
LOG_FROM = 20.0  # times the slowest: a linear axis would show the slow one as nothing
ROOM = 0.8  # of a rank's place that its bars fill
WIDEST = 0.36


def rates_of(scene: Scene) -> dict[Link, float]:
    """Return what links carry, ordered by sending and receiving rank."""
    found = {
        (source, target): speed
        for source, targets in scene.analysis.links.items()
        for target, speed in targets.items()
        if speed > 0
    }
    return dict(sorted(found.items()))


def slow_links(rates: Rates, rank: int) -> set[Link]:
    """Return the links that make `rank` slow: its slowest, and what is as bad beside the others."""
    own = {link: speed for link, speed in rates.items() if rank in link}
    if not own:
        return set()
    others = [speed for link, speed in rates.items() if link not in own] or list(rates.values())
    limit = SLOWER * median_high(others)
    return {min(own, key=own.__getitem__)} | {k for k, speed in own.items() if speed < limit}


class LinkBars:
    """The bars; the axes are made for `ranks`, and redrawn when the speeds ask for it."""

    def __init__(self, axes: Axes, theme: Theme, ranks: tuple[int, ...]) -> None:
        self.axes, self._theme, self._ranks = axes, theme, ranks
        self._scale: tuple[bool, Limits] | None = None
        self._artists: list[Artist] = []
        every = 1 << max(0, math.ceil(math.log2(len(ranks) / 16)))
        shown = range(0, len(ranks), every)
        axes.set_xticks(list(shown), [str(ranks[i]) for i in shown])
        axes.set_xlim(-0.6, len(ranks) - 0.4)
        axes.set_xlabel("rank that sends", color=theme.text, fontsize=8, labelpad=1)
        title(axes, "links, bytes per second while busy", theme)

    def fit(self, scene: Scene) -> bool:
        """Take in new data; return whether the axes have changed and must be redrawn."""
        rates = rates_of(scene)
        judged = [v.rank for v in scene.analysis.verdicts if v.cause == "link"]
        slow = set().union(*(slow_links(rates, rank) for rank in judged))
        changed = self._set_scale(list(rates.values()))
        places = self._places(rates)
        is_slow = np.array([link in slow for link in rates], dtype=bool)
        speeds = np.array(list(rates.values()))
        self._artists = [
            self._bars(places[:, ~is_slow], speeds[~is_slow], "compute"),
            self._bars(places[:, is_slow], speeds[is_slow], "waiting"),
        ]
        for rank in judged:
            self._artists += self._name(rates, slow_links(rates, rank), places)
        return changed

    def draw(self) -> None:
        """Draw the bars."""
        draw(self._artists, self.axes)

    def _set_scale(self, speeds: list[float]) -> bool:
        """Fit the axis; it begins at 0, or a power of ten below the slowest when logarithmic."""
        low, high = min(speeds), max(speeds)
        is_log = high > LOG_FROM * low
        limits = 10 ** math.floor(math.log10(low) - 0.2) if is_log else 0.0, _above(high, is_log)
        changed = self._scale != (is_log, limits)
        if changed:
            self._scale = is_log, limits
            self.axes.set_yscale("log" if is_log else "linear")
            self.axes.set_ylim(*limits)
            self.axes.yaxis.set_major_formatter(FuncFormatter(_tick))
            if is_log:
                self.axes.yaxis.set_minor_locator(NullLocator())
        return changed

    def _places(self, rates: Rates) -> Floats:
        """Return the left and the right edge of each link's bar (2, L)."""
        edges = []
        for source, target in rates:
            mine = [to for begin, to in rates if begin == source]
            width = min(WIDEST, ROOM / len(mine))
            middle = self._ranks.index(source) if source in self._ranks else len(self._ranks)
            left = middle + width * (mine.index(target) - len(mine) / 2)
            edges.append((left + 0.04 * width, left + 0.96 * width))
        return np.array(edges, dtype=np.float64).T

    def _bars(self, places: Floats, speeds: Floats, part: str) -> Artist:
        color, hatch = palette.PARTS[part]
        edge = self._theme.background or "#ffffff"
        assert self._scale is not None  # it was set for these
        base = np.full(len(speeds), self._scale[1][0])
        path = rectangles(places[0], places[1], base, speeds)
        return PathPatch(path, facecolor=color, edgecolor=edge, linewidth=0, hatch=hatch)

    def _name(self, rates: Rates, slow: set[Link], places: Floats) -> list[Artist]:
        """Write over the slowest of a rank's slow links which one it is, and how slow."""
        if not slow:
            return []
        worst = min(slow, key=lambda link: rates[link])
        left, right = places[:, list(rates).index(worst)]
        middle, count = float(left + right) / 2, len(self._ranks)
        side = "left" if middle < count / 3 else "right" if middle > 2 * count / 3 else "center"
        edge = {"left": left, "right": right, "center": middle}[side]
        words = f"from rank {worst[0]} to rank {worst[1]}: {name_rate(rates[worst])}"
        # Above all bars, for those beside it are higher.
        y = 0.99
        return [
            note(
                float(edge), y, words, self._theme, ha=side, va="top", fontweight="bold",
                transform=self.axes.get_xaxis_transform(),
            )
        ]  # fmt: skip


def _above(high: float, is_log: bool) -> float:
    """Return an end of the axis with room for words over the highest bar."""
    step = 10 ** math.floor(math.log10(high))
    if is_log:
        return float(10 ** (math.log10(high) + 0.8))
    return float(math.ceil(1.3 * high / step * 2) * step / 2)


def _tick(value: float, position: int | None = None) -> str:
    return name_rate(value, "{:g}".format) if value else "0"
