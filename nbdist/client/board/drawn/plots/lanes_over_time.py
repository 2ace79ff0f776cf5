"""One number of many ranks over time: a lane a rank, filled as high as the value is on its scale.

All lanes have one scale, named below the title. A lane of a few pixels is still read: as a skyline,
beside its neighbours.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FixedLocator, FuncFormatter

from nbdist.client.board.drawn.artists import note, put, title
from nbdist.client.board.drawn.plots.strips import Strip, extremes
from nbdist.client.board.palette import Theme
from nbdist.client.board.scales import Floats, decimate
from nbdist.client.board.scene.devices import QUANTITIES
from nbdist.client.board.scene.scene import Curve, Panel

FILLED, LIFT = 0.84, 0.42  # of a lane; how far below its middle it begins
MOST_WRITTEN = 16  # more lanes have no number each
WORDS_BELOW_PX, LIMITS_PX, TICK_PX = 34, 10, 60
_TICKS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 28_800)


def draw_lanes(
    axes: Axes, panel: Panel, ranks: tuple[int, ...], theme: Theme, size_px: tuple[float, float]
) -> None:
    """Draw a panel of `Scene.devices`, with the newest value of each lane."""
    end_s = max(1.0, *(float(line.x[-1]) for line in panel.lines))
    _set_axes(axes, panel, ranks, theme, size_px, end_s)
    put(axes, [_grounds(len(ranks), end_s, theme), _skyline(panel, ranks, size_px[0])])
    _write_newest(axes, panel, ranks, theme, size_px)


def _set_axes(
    axes: Axes,
    panel: Panel,
    ranks: tuple[int, ...],
    theme: Theme,
    size_px: tuple[float, float],
    end_s: float,
) -> None:
    width_px, height_px = size_px
    every = 1 << max(0, int(np.ceil(np.log2(len(ranks) / MOST_WRITTEN))))
    shown = range(0, len(ranks), every)
    axes.set_yticks(list(shown), [str(ranks[i]) for i in shown])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.grid(False)
    axes.set_xlim(0, end_s)
    most_ticks = max(2, int(width_px / TICK_PX))
    every_s = next((t for t in _TICKS_S if end_s / t <= most_ticks), 86_400)
    axes.xaxis.set_major_locator(FixedLocator([*np.arange(0, end_s * 1.001, every_s)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, place: name_time(value)))
    title(axes, panel.title, theme, pad=17)
    limits = f"{panel.floor or 0:.0f} to {QUANTITIES[panel.key].write(_top(panel))}"
    put(axes, [note(0, 1 + LIMITS_PX / height_px, limits, theme, transform=axes.transAxes)])


def _top(panel: Panel) -> float:
    assert panel.top is not None  # devices' have one
    return panel.top


def _skyline(panel: Panel, ranks: tuple[int, ...], width_px: float) -> PathPatch:
    lanes = {rank: place for place, rank in enumerate(ranks)}
    outlines = [
        _outline(panel, line, lanes[line.rank] + LIFT, max(40, int(width_px / 3)))
        for line in panel.lines
        if line.rank in lanes
    ]
    paths = [Path(outline, closed=True) for outline in outlines]
    whole = Path.make_compound_path(*paths) if paths else Path(np.zeros((0, 2)))
    return PathPatch(whole, facecolor=QUANTITIES[panel.key].color, linewidth=0)


def _outline(panel: Panel, line: Curve, base: float, columns: int) -> Floats:
    floor = panel.floor or 0.0
    x, y = decimate(line.x, line.y, columns)
    if len(x) == 1:  # a second of it
        x, y = np.array([x[0], x[0] + 1]), np.array([y[0], y[0]])
    high = base - FILLED * np.clip((y - floor) / (_top(panel) - floor), 0, 1)
    # From the first moment to the last: of these, few are among the points that are left.
    first, last = line.x[0], max(line.x[-1], x[-1])
    edge_x = np.concatenate([[first, first], x, [last, last, first]])
    edge_y = np.concatenate([[base, high[0]], high, [high[-1], base, base]])
    outline: Floats = np.stack([edge_x, edge_y], axis=1)
    return outline


def _grounds(count: int, end_s: float, theme: Theme) -> PathPatch:
    """Return the base line of each lane: all that is seen of an idle one."""
    at = np.arange(count) + LIFT
    ends = np.stack([np.stack([np.full(count, x), at], axis=1) for x in (0, end_s)], 1)
    path = Path(ends.reshape(-1, 2), [Path.MOVETO, Path.LINETO] * count)
    return PathPatch(path, edgecolor=theme.text, linewidth=0.4, alpha=0.6, fill=False)


def _write_newest(
    axes: Axes, panel: Panel, ranks: tuple[int, ...], theme: Theme, size_px: tuple[float, float]
) -> None:
    """Write the newest value beside each lane; of many, the extremes below them."""
    width_px, height_px = size_px
    write = QUANTITIES[panel.key].write
    newest = {line.rank: float(line.y[-1]) for line in panel.lines}
    if len(ranks) > MOST_WRITTEN:
        values = np.array([newest.get(rank, np.nan) for rank in ranks])
        words = extremes(ranks, Strip(panel.title, "", values, write))
        left, below = -22 / width_px, -WORDS_BELOW_PX / height_px  # where the ranks' numbers begin
        put(axes, [note(left, below, words, theme, transform=axes.transAxes)])
        return
    beside = axes.get_yaxis_transform()
    put(
        axes,
        [
            note(1.02, place, write(newest[rank]), theme, transform=beside)
            for place, rank in enumerate(ranks)
            if rank in newest
        ],
    )


def name_time(seconds: float) -> str:
    """Return a label of the time axis: 0, 30 s, 5 min, 2 h."""
    if seconds == 0:
        return "0"
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"
