"""The work of each rank beside that of its peers.

Own work is what verdicts compare: a step without its communication, be it transferring or waiting,
for a slow link is no work.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.text import Text
from numpy.typing import NDArray

from nbdist.client.board.drawn.artists import note, part_look, put, rectangles, title
from nbdist.client.board.palette import Theme
from nbdist.client.board.scales import Floats
from nbdist.client.board.scene.scene import Scene, Stack
from nbdist.client.board.text import slower
from nbdist.client.metrics.analysis.advice import advice_for
from nbdist.shared.text import figure

HALF = 0.36  # of a bar's width, in ranks
MOST_NAMES = 4  # ranks whose bars are wide enough for names beside each other


def draw_own_work(axes: Axes, theme: Theme, scene: Scene, stack: Stack) -> None:
    """Draw a bar a rank, those of verdicts in another colour and named, and the median's line."""
    count = len(stack.ranks)
    every = 1 << max(0, int(np.ceil(np.log2(count / 16))))
    shown = range(0, count, every)
    axes.set_xticks(list(shown), [str(stack.ranks[i]) for i in shown])
    air = 0.6 if count > 3 else 1.6
    axes.set_xlim(-air, count - 1 + air)
    axes.set_xlabel("rank", color=theme.text, fontsize=8, labelpad=1)
    title(axes, "time per step without communication (mean, ms)", theme)
    own = scene.own_work_ms(stack)
    top = float(own.max())
    axes.set_ylim(0.0, top * 1.18 if top > 0 else 1.0)
    judged = {v.rank: v for v in scene.analysis.verdicts if v.cause != "link"}
    at = np.arange(count, dtype=np.float64)
    is_slow = np.array([rank in judged for rank in stack.ranks])
    put(axes, [_bars(at[~is_slow], own[~is_slow], "compute", theme)])
    put(axes, [_bars(at[is_slow], own[is_slow], "waiting", theme)])
    if count > 1:
        middle = float(np.median(own[~is_slow])) if not is_slow.all() else float(np.median(own))
        _draw_median(axes, middle, _whose(is_slow), theme)
    places = np.flatnonzero(is_slow)
    if count > MOST_NAMES and len(places):  # else the sentences name them all
        places = places[[int(own[places].argmax())]]
    for place in places:
        verdict = judged[stack.ranks[place]]
        words = f"rank {verdict.rank}: {_more(verdict.share)}, {advice_for(verdict).cause}"
        put(axes, [_name(float(at[place]), float(own[place]), words, count, theme)])


def _bars(at: Floats, height: Floats, part: str, theme: Theme) -> PathPatch:
    path = rectangles(at - HALF, at + HALF, np.zeros(len(at)), height)
    return PathPatch(path, **part_look(part, theme))


def _draw_median(axes: Axes, middle: float, whose: str, theme: Theme) -> None:
    across = axes.get_yaxis_transform()
    rule = Line2D(
        [0, 1], [middle, middle], color=theme.text, linewidth=1.2, linestyle=(0, (4, 3)),
        transform=across,
    )  # fmt: skip
    words = f"{whose}\n{figure(middle)} ms"
    put(axes, [rule, note(1.01, middle, words, theme, transform=across)])


def _name(x: float, y: float, words: str, count: int, theme: Theme) -> Text:
    side = "left" if x < count / 3 else "right" if x > 2 * count / 3 else "center"
    edge = {"left": -HALF, "right": HALF, "center": 0.0}[side]
    return note(x + edge, y, words, theme, ha=side, va="bottom", fontweight="bold")


def _more(share: float) -> str:
    return f"+{slower(share)}" if share < 1 else slower(share)


def _whose(is_slow: NDArray[np.bool_]) -> str:
    """Return what the line is, where some ranks may be named as slow."""
    if is_slow.all() or not is_slow.any():
        return "median"
    return "the other rank" if len(is_slow) == 2 else "median of the others"
