"""The time line of the last steps: one lane a rank, one bar a collective.

A bar's colour and number name its line in the table. Its shades show what it did: empty while it
queued, hatched while a rank was missing, solid while it moved. The line below a lane is when the
rank's main thread was blocked.
"""

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.text import Text

from nbdist.client.board import palette
from nbdist.client.board.drawn.artists import note, put, rectangles, title
from nbdist.client.board.drawn.measures import TEXT_PT
from nbdist.client.board.palette import Theme
from nbdist.client.board.scene.lanes import phases, telling_lanes, tracks
from nbdist.client.board.scene.scene import Scene
from nbdist.client.metrics.analysis.values import Span, TimeLine, TimelineLane

OUTLINE = 0.8
NUMBER_PX = 9  # width of a bar that a number fits into
MOST_NUMBERS = 160  # the widest have theirs: more would be mud, and take a second
ALPHAS = {"queueing": 0.0, "waiting": 0.2, "transferring": 1.0}  # within a full outline
LANE_TOP, LANE_LOW = -0.36, 0.26  # of the bars in a lane of height 1
BLOCKED_Y = 0.36

Box = tuple[float, float, float, float]  # left, right, low, high


def draw_timeline(axes: Axes, theme: Theme, scene: Scene, width_px: float) -> None:
    """Draw the lanes over milliseconds, of a scene that has a line."""
    line, lanes = scene.analysis.line, telling_lanes(scene)
    assert line is not None  # it is why there is this plot
    title(axes, "time line of the last steps, ms", theme, pad=19)
    axes.set_xlim(0.0, line.length_ms if line.length_ms > 0 else 1.0)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), [f"rank {lane.rank}" for lane in lanes])
    axes.grid(False)
    axes.grid(axis="x", color=theme.text, alpha=0.16, linewidth=0.6)
    put(axes, _bars(lanes, width_px / axes.get_xlim()[1]))
    put(axes, [_blocked(lanes, theme), *_steps(line, len(lanes), axes, theme)])


def _bars(lanes: list[TimelineLane], px_per_ms: float) -> list[Artist]:
    boxes: dict[tuple[int, str], list[Box]] = {}
    numbers: list[tuple[float, list[Artist]]] = []
    placed_in = tracks(lanes)
    count = 1 + max((track for placed in placed_in for track in placed), default=0)
    height = (LANE_LOW - LANE_TOP) / count
    for place, (lane, placed) in enumerate(zip(lanes, placed_in, strict=True)):
        for span, track in zip(lane.spans, placed, strict=True):
            high = place + LANE_TOP + track * height
            low = high + 0.92 * height
            for name, (begin, end) in phases(span).items():
                boxes.setdefault((span.row, name), []).append((begin, end, low, high))
            if (at := _number_at(span, px_per_ms)) is not None:
                x, is_solid = at
                ground = None if is_solid else (0.8 * _needed_ms(span, px_per_ms), 0.84 * height)
                number = _number(span.row, x, (low + high) / 2, ground)
                numbers.append((span.end_ms - span.begin_ms, number))
    artists: list[Artist] = []
    hatched: dict[str, list[Box]] = {}
    for (row, name), found in boxes.items():
        artists.append(filled(found, palette.row_color(row), ALPHAS[name]))
        if name == "waiting":
            hatched.setdefault(palette.row_color(row), []).extend(found)
    artists += [hatch_over(found, color) for color, found in hatched.items()]
    widest = sorted(numbers, key=lambda number: -number[0])[:MOST_NUMBERS]
    return artists + [artist for _, number in widest for artist in number]


def _number(row: int, x: float, y: float, ground: tuple[float, float] | None) -> list[Artist]:
    """Return a number of the table in a bar, on a ground of this width and height if on a hatch."""
    color = palette.row_color(row)
    number = Text(
        x, y, str(row + 1), color=_ink(color), fontsize=TEXT_PT, fontweight="bold", ha="center",
        va="center_baseline",
    )  # fmt: skip
    if ground is None:
        return [number]
    half_ms, half = ground[0] / 2, ground[1] / 2
    return [filled([(x - half_ms, x + half_ms, y - half, y + half)], color, 1.0), number]


def _blocked(lanes: list[TimelineLane], theme: Theme) -> Line2D:
    x: list[float] = []
    y: list[float] = []
    for place, lane in enumerate(lanes):
        for begin, end in lane.blocked:
            x += [begin, end, np.nan]
            y += [place + BLOCKED_Y, place + BLOCKED_Y, np.nan]
    return Line2D(x, y, color=theme.text, linewidth=2.6, solid_capstyle="butt")


def _steps(line: TimeLine, lanes: int, axes: Axes, theme: Theme) -> list[Artist]:
    """Return where steps begin, and their numbers above."""
    x = [at for _, begin, _ in line.steps for at in (begin, begin, np.nan)]
    y = [at for _ in line.steps for at in (-0.5, lanes - 0.5, np.nan)]
    rules = Line2D(x, y, color=theme.text, linewidth=0.9, linestyle=(0, (4, 3)))
    names = [
        note(
            (begin + end) / 2, 1.0, f"step {number:,}", theme, ha="center", va="bottom",
            transform=axes.get_xaxis_transform(),
        )
        for number, begin, end in line.steps
    ]  # fmt: skip
    return [rules, *names]


def _needed_ms(span: Span, px_per_ms: float) -> float:
    """Return how wide a span's number is."""
    return NUMBER_PX * len(str(span.row + 1)) / px_per_ms


def _number_at(span: Span, px_per_ms: float) -> tuple[float, bool] | None:
    """Return where a span's number fits, and whether that is solid; None when nowhere."""
    needed_ms = _needed_ms(span, px_per_ms)
    begin, end = phases(span).get("transferring", (0.0, 0.0))
    if end - begin >= needed_ms:
        return (begin + end) / 2, True
    if span.end_ms - span.begin_ms >= needed_ms:
        return (span.begin_ms + span.end_ms) / 2, False
    return None


def legend(theme: Theme, labels: tuple[str, str, str, str]) -> list[Artist]:
    """Return what the shades mean, in this order."""
    queueing, waiting, transferring, blocked = labels
    color = palette.LINE_COLORS[0]
    return [
        Patch(facecolor="none", edgecolor=color, linewidth=OUTLINE, label=queueing),
        Patch(facecolor=(*_rgb(color), ALPHAS["waiting"]), edgecolor=color, hatch="/////",
              linewidth=0, label=waiting),
        Patch(facecolor=color, label=transferring),
        Line2D([], [], color=theme.text, linewidth=2.6, label=blocked),
    ]  # fmt: skip


def filled(boxes: list[Box], color: str, alpha: float) -> PathPatch:
    """Return boxes of one colour, with an outline that is seen however faint they are."""
    inside = (*_rgb(color), alpha)
    return PathPatch(_path(boxes), facecolor=inside, edgecolor=color, linewidth=OUTLINE)


def hatch_over(boxes: list[Box], color: str) -> PathPatch:
    """Return the hatch of boxes that are filled already with less of the same colour.

    Strong on faint is seen whatever the colour and the background, as a grey ink is not on grey.
    One path a colour, for each prepares a hatch.
    """
    return PathPatch(_path(boxes), facecolor="none", edgecolor=color, hatch="/////", linewidth=0)


def _path(boxes: list[Box]) -> Path:
    left, right, low, high = np.array(boxes, dtype=np.float64).T
    return rectangles(left, right, low, high)


def _rgb(color: str) -> tuple[float, float, float]:
    return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))  # type: ignore[return-value]


def _ink(color: str) -> str:
    """Return black or white, whichever is read better on `color`."""
    dark, light = "#111111", "#ffffff"
    is_dark = palette.contrast(color, dark) >= palette.contrast(color, light)
    return dark if is_dark else light
