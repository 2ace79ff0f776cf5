"""How fast links are: a bar for each link, by the rank that sends; the slow ones marked."""

import math
from collections.abc import Mapping
from statistics import median_high

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, NullLocator

from nbdist.client.board.drawn.artists import note, part_look, put, rectangles, title
from nbdist.client.board.palette import Theme
from nbdist.client.board.scales import Floats
from nbdist.client.board.scene.scene import Scene
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


def draw_links(axes: Axes, theme: Theme, scene: Scene) -> None:
    """Draw the bars, of which there is one at least."""
    ranks, rates = scene.ranks, rates_of(scene)
    every = 1 << max(0, math.ceil(math.log2(len(ranks) / 16)))
    shown = range(0, len(ranks), every)
    axes.set_xticks(list(shown), [str(ranks[i]) for i in shown])
    axes.set_xlim(-0.6, len(ranks) - 0.4)
    axes.set_xlabel("rank that sends", color=theme.text, fontsize=8, labelpad=1)
    title(axes, "links, bytes per second while busy", theme)
    base = _set_scale(axes, list(rates.values()))
    judged = [v.rank for v in scene.analysis.verdicts if v.cause == "link"]
    slow = set().union(*(slow_links(rates, rank) for rank in judged))
    left, right = _places(rates, ranks)
    is_slow = np.array([link in slow for link in rates], dtype=bool)
    speeds = np.array(list(rates.values()))
    for part, those in (("compute", ~is_slow), ("waiting", is_slow)):
        bases = np.full(int(those.sum()), base)
        path = rectangles(left[those], right[those], bases, speeds[those])
        put(axes, [PathPatch(path, **part_look(part, theme))])
    for rank in judged:
        if found := slow_links(rates, rank):
            worst = min(found, key=lambda link: rates[link])
            at = list(rates).index(worst)
            words = f"from rank {worst[0]} to rank {worst[1]}: {name_rate(rates[worst])}"
            put(axes, [_name(axes, words, float(left[at]), float(right[at]), len(ranks), theme)])


def _set_scale(axes: Axes, speeds: list[float]) -> float:
    """Fit the axis; it begins at 0, or a power of ten below the slowest when logarithmic."""
    low, high = min(speeds), max(speeds)
    is_log = high > LOG_FROM * low
    base = 10 ** math.floor(math.log10(low) - 0.2) if is_log else 0.0
    axes.set_yscale("log" if is_log else "linear")
    axes.set_ylim(base, _above(high, is_log))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))
    if is_log:
        axes.yaxis.set_minor_locator(NullLocator())
    return base


def _places(rates: Rates, ranks: tuple[int, ...]) -> Floats:
    """Return the left and the right edge of each link's bar (2, L)."""
    edges = []
    for source, target in rates:
        mine = [to for begin, to in rates if begin == source]
        width = min(WIDEST, ROOM / len(mine))
        middle = ranks.index(source) if source in ranks else len(ranks)
        left = middle + width * (mine.index(target) - len(mine) / 2)
        edges.append((left + 0.04 * width, left + 0.96 * width))
    return np.array(edges, dtype=np.float64).T


def _name(axes: Axes, words: str, left: float, right: float, count: int, theme: Theme) -> Text:
    """Return what is written over a slow link: above all bars, for those beside it are higher."""
    middle = (left + right) / 2
    side = "left" if middle < count / 3 else "right" if middle > 2 * count / 3 else "center"
    edge = {"left": left, "right": right, "center": middle}[side]
    return note(
        edge, 0.99, words, theme, ha=side, va="top", fontweight="bold",
        transform=axes.get_xaxis_transform(),
    )  # fmt: skip


def _above(high: float, is_log: bool) -> float:
    """Return an end of the axis with room for words over the highest bar."""
    step = 10 ** math.floor(math.log10(high))
    if is_log:
        return float(10 ** (math.log10(high) + 0.8))
    return float(math.ceil(1.3 * high / step * 2) * step / 2)


def _tick(value: float, position: int | None = None) -> str:
    return name_rate(value, "{:g}".format) if value else "0"
