"""matplotlib artists for the board: made by hand, drawn once a frame, never added to axes."""

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from nbdist.client.board import palette
from nbdist.client.board.palette import Theme
from nbdist.client.board.scales import Floats

TEXT_PT, TITLE_PT = 8.0, 9.5
BAND_ALPHAS = 0.14, 0.26  # of all ranks, and of the middle 80 % of them
PARTS = {
    "compute": palette.COMPUTE,
    "communication": palette.COMM,
    "data": palette.DATA,
}


def draw(artists: list[Artist], axes: Axes) -> None:
    """Draw `artists` into `axes` without adding them: they live for one frame."""
    for artist in artists:
        if artist.axes is None:
            artist.axes = axes
            artist.set_figure(axes.figure)
            if not artist.is_transform_set():
                artist.set_transform(axes.transData)
            artist.set_clip_box(axes.bbox)
        axes.draw_artist(artist)


def boxes(at: Floats, base: Floats, height: Floats) -> Path:
    """Return one path of a box a rank (K corners, R ranks, 2 coordinates)."""
    left, right, top = at - 0.36, at + 0.36, base + height
    corners_KR2 = np.stack(
        [
            np.stack([left, base], axis=1),
            np.stack([left, top], axis=1),
            np.stack([right, top], axis=1),
            np.stack([right, base], axis=1),
            np.stack([left, base], axis=1),
        ]
    )
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(at)
    return Path(corners_KR2.transpose(1, 0, 2).reshape(-1, 2), codes)


def part_patch(name: str, theme: Theme, ranks: int) -> Patch:
    """Return how one part of a step looks, in bars and legend; thin bars carry no hatch."""
    hatch = palette.HATCHES[name] if ranks <= 2 * palette.MANY else ""
    over = theme.background or "#ffffff"
    return Patch(facecolor=PARTS[name], edgecolor=over, linewidth=0, label=name, hatch=hatch)


def area(x: Floats, low: Floats, high: Floats, color: str, alpha: float) -> PathPatch:
    """Return the area between two lines."""
    edge_x, edge_y = np.concatenate([x, x[::-1]]), np.concatenate([low, high[::-1]])
    outline = Path(np.stack([edge_x, edge_y], axis=1), closed=False)
    return PathPatch(outline, facecolor=color, alpha=alpha, linewidth=0)


def pen(color: str, dashes: tuple[float, ...], width: float, alpha: float) -> Line2D:
    """Return a line without points; making one costs as much as drawing it."""
    line = Line2D([], [], color=color, linewidth=width, alpha=alpha, solid_capstyle="round")
    line.set_markersize(3.0)
    if dashes:
        line.set_dashes(dashes)
    return line


def path(
    x: Floats, y: Floats, color: str, dashes: tuple[float, ...], width: float, alpha: float
) -> Line2D:
    """Return a line through the points."""
    line = pen(color, dashes, width, alpha)
    line.set_data(x, y)
    return line


def rank_samples(ranks: tuple[int, ...], theme: Theme) -> list[Artist]:
    """Return what the legend says of the lines."""
    if len(ranks) <= palette.MANY:
        return [_sample(f"rank {rank}", place) for place, rank in enumerate(ranks)]
    all_of_them, most = BAND_ALPHAS
    return [
        Patch(facecolor=theme.text, alpha=all_of_them, label=f"all {len(ranks)} ranks"),
        Patch(facecolor=theme.text, alpha=min(1.0, all_of_them + most), label="80 % of them"),
        Line2D([], [], color=theme.text, linewidth=1.6, label="median"),
        _sample("highest", 0),
        _sample("lowest", 1),
    ]


def _sample(label: str, place: int) -> Line2D:
    line = pen(*palette.line_style(place), 1.8, 1.0)
    line.set_label(label)
    return line


def title(axes: Axes, text: str, theme: Theme) -> None:
    """Write a plot's title; drawn with the axes."""
    axes.set_title(text, loc="left", fontsize=TITLE_PT, color=theme.text, fontweight="bold", pad=8)
