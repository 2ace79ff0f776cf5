"""The work of each rank beside that of its peers.

Own work is what verdicts compare: a step without its communication, be it transferring or waiting,
for a slow link is no work.
"""

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from numpy.typing import NDArray

from nbdist.client.board import palette
from nbdist.client.board.artists import boxes, draw, note, title
from nbdist.client.board.palette import Theme
from nbdist.client.board.scales import Floats, Limits, grown
from nbdist.client.board.scene import Scene, Stack
from nbdist.client.board.text import slower
from nbdist.client.metrics.analysis.advice import advice_for
from nbdist.shared.text import figure

MOST_NAMES = 4  # ranks whose bars are wide enough for names beside each other
EXPOSED = "transfer", "waiting", "communication"  # what is not the work of a rank


def own_work_ms(scene: Scene, stack: Stack) -> Floats:
    """Return a step without its exposed communication, by rank, over the verdicts' own steps."""
    judged = scene.analysis.own_ms
    if all(rank in judged for rank in stack.ranks):
        return np.array([judged[rank] for rank in stack.ranks])
    own = [part for name, part in stack.parts.items() if name not in EXPOSED]
    whole: Floats = np.sum(own, axis=0)
    return whole


class OwnWork:
    """A bar a rank, those of verdicts in another colour and named, and the median as a line."""

    def __init__(self, axes: Axes, theme: Theme, stack: Stack, final: bool) -> None:
        self.axes, self._theme, self._final = axes, theme, final
        self._y: Limits | None = None
        self._artists: list[Artist] = []
        count = len(stack.ranks)
        every = 1 << max(0, int(np.ceil(np.log2(count / 16))))
        shown = range(0, count, every)
        axes.set_xticks(list(shown), [str(stack.ranks[i]) for i in shown])
        air = 0.6 if count > 3 else 1.6
        axes.set_xlim(-air, count - 1 + air)
        axes.set_xlabel("rank", color=theme.text, fontsize=8, labelpad=1)
        title(axes, "time per step without communication (mean, ms)", theme)

    def fit(self, scene: Scene) -> bool:
        """Take in new data; return whether the axes have changed and must be redrawn."""
        stack = scene.stack
        assert stack is not None  # it is why there is this plot
        own = own_work_ms(scene, stack)
        top = float(own.max())
        y = (0.0, top * 1.18 if top > 0 else 1.0)
        if not self._final:
            y = grown(self._y, y)
        changed = y != self._y
        if changed:
            self._y = y
            self.axes.set_ylim(*y)
        judged = {v.rank: v for v in scene.analysis.verdicts if v.cause != "link"}
        at = np.arange(len(stack.ranks), dtype=np.float64)
        is_slow = np.array([rank in judged for rank in stack.ranks])
        middle = float(np.median(own[~is_slow])) if not is_slow.all() else float(np.median(own))
        self._artists = [self._bars(at[~is_slow], own[~is_slow], "compute")]
        self._artists.append(self._bars(at[is_slow], own[is_slow], "waiting"))
        if len(at) > 1:
            self._artists += [self._rule(middle), self._median(middle, _whose(is_slow))]
        places = np.flatnonzero(is_slow)
        if len(at) > MOST_NAMES and len(places):  # else the sentences name them all
            places = places[[int(own[places].argmax())]]
        for place in places:
            verdict = judged[stack.ranks[place]]
            words = f"rank {verdict.rank}: {_more(verdict.share)}, {advice_for(verdict).cause}"
            self._artists.append(self._name(float(at[place]), float(own[place]), words, len(at)))
        return changed

    def draw(self) -> None:
        """Draw the bars."""
        draw(self._artists, self.axes)

    def _bars(self, at: Floats, height: Floats, part: str) -> Artist:
        color, hatch = palette.PARTS[part]
        edge = self._theme.background or "#ffffff"
        bars = boxes(at, np.zeros(len(at)), height)
        return PathPatch(bars, facecolor=color, edgecolor=edge, linewidth=0, hatch=hatch)

    def _rule(self, middle: float) -> Artist:
        return Line2D(
            [0, 1], [middle, middle], color=self._theme.text, linewidth=1.2, linestyle=(0, (4, 3)),
            transform=self.axes.get_yaxis_transform(),
        )  # fmt: skip

    def _median(self, middle: float, whose: str) -> Artist:
        return note(
            1.01, middle, f"{whose}\n{figure(middle)} ms", self._theme, clip_on=False,
            transform=self.axes.get_yaxis_transform(),
        )  # fmt: skip

    def _name(self, x: float, y: float, words: str, count: int) -> Artist:
        side = "left" if x < count / 3 else "right" if x > 2 * count / 3 else "center"
        edge = {"left": -0.36, "right": 0.36, "center": 0.0}[side]
        return note(x + edge, y, words, self._theme, ha=side, va="bottom", fontweight="bold")


def _more(share: float) -> str:
    return f"+{slower(share)}" if share < 1 else slower(share)


def _whose(is_slow: NDArray[np.bool_]) -> str:
    """Return what the line is, where some ranks may be named as slow."""
    if is_slow.all() or not is_slow.any():
        return "median"
    return "the other rank" if len(is_slow) == 2 else "median of the others"
