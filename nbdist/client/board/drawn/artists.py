"""matplotlib artists that plots are made of."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.text import Text

from nbdist.client.board import palette
from nbdist.client.board.drawn.measures import TEXT_PT, TITLE_PT
from nbdist.client.board.palette import Theme
from nbdist.client.board.scales import Floats

BAND_ALPHAS = 0.14, 0.26  # of all ranks, and of the middle 80 % of them
_ABOVE = 4  # z-order: what axes draw by themselves has 3 at most


def put(axes: Axes, artists: Iterable[Artist]) -> None:
    """Add artists to axes: upon what is there, and upon each other in this order."""
    for artist in artists:
        artist.set_zorder(_ABOVE)
        axes.add_artist(artist)


def rectangles(left: Floats, right: Floats, low: Floats, high: Floats) -> Path:
    """Return one path of many boxes (K corners, B boxes, 2 coordinates)."""
    corners_KB2 = np.stack(
        [
            np.stack([left, low], axis=1),
            np.stack([left, high], axis=1),
            np.stack([right, high], axis=1),
            np.stack([right, low], axis=1),
            np.stack([left, low], axis=1),
        ]
    )
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(left)
    return Path(corners_KB2.transpose(1, 0, 2).reshape(-1, 2), codes)


def part_look(name: str, theme: Theme, ranks: int = 1) -> dict[str, Any]:
    """Return how one part of a step looks, as a patch's options; thin bars carry no hatch."""
    color, hatch = palette.PARTS[name]
    return {
        "facecolor": color,
        "edgecolor": theme.background or "#ffffff",
        "linewidth": 0,
        "hatch": hatch if ranks <= 2 * palette.MANY else "",
    }


def part_samples(names: Iterable[str], theme: Theme, ranks: int) -> list[Artist]:
    """Return what the legend says of the parts of a step."""
    return [
        Patch(label=palette.part_label(name), **part_look(name, theme, ranks)) for name in names
    ]


def area(x: Floats, low: Floats, high: Floats, color: str, alpha: float) -> PathPatch:
    """Return the area between two lines."""
    edge_x, edge_y = np.concatenate([x, x[::-1]]), np.concatenate([low, high[::-1]])
    outline = Path(np.stack([edge_x, edge_y], axis=1), closed=False)
    return PathPatch(outline, facecolor=color, alpha=alpha, linewidth=0)


def note(x: float, y: float, words: str, theme: Theme, **options: Any) -> Text:
    """Return words in or beside a plot, at its data's coordinates unless a transform is given."""
    options = {
        "color": theme.text,
        "fontsize": TEXT_PT,
        "va": "center",
        "clip_on": False,
        **options,
    }
    return Text(x, y, words, **options)


def path(
    x: Floats, y: Floats, color: str, dashes: tuple[float, ...], width: float, alpha: float
) -> Line2D:
    """Return a line through the points."""
    return Line2D(
        x, y, color=color, linewidth=width, alpha=alpha, markersize=3.0,
        linestyle=(0, dashes) if dashes else "-", solid_capstyle="round",
    )  # fmt: skip


def rank_samples(ranks: tuple[int, ...], theme: Theme) -> list[Artist]:
    """Return what the legend says of the lines."""
    labels = palette.rank_labels(ranks)
    if len(ranks) <= palette.MANY:
        return [sample(label, *palette.line_style(place)) for place, label in enumerate(labels)]
    all_of_them, most = BAND_ALPHAS
    return [
        Patch(facecolor=theme.text, alpha=all_of_them, label=labels[0]),
        Patch(facecolor=theme.text, alpha=min(1.0, all_of_them + most), label=labels[1]),
        sample(labels[2], theme.text, (), 1.6),
        sample(labels[3], *palette.line_style(0)),
        sample(labels[4], *palette.line_style(1)),
    ]


def sample(label: str, color: str, dashes: tuple[float, ...], width: float = 1.8) -> Line2D:
    """Return a line for a legend."""
    line = path(np.empty(0), np.empty(0), color, dashes, width, 1.0)
    line.set_label(label)
    return line


def nothing_yet(axes: Axes, words: str, theme: Theme) -> None:
    """Say in an empty plot why it is empty."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines["bottom"].set_visible(False)
    axes.text(
        0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", fontsize=TITLE_PT,
        color=theme.text,
    )  # fmt: skip


def title(axes: Axes, text: str, theme: Theme, pad: float = 8) -> None:
    """Write a plot's title, `pad` points above it."""
    axes.set_title(
        text, loc="left", fontsize=TITLE_PT, color=theme.text, fontweight="bold", pad=pad
    )
