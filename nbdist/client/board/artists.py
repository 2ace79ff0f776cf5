"""matplotlib artists for the board: made by hand, drawn once a frame, never added to axes."""

from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import GraphicsContextBase, RendererBase
from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.transforms import IdentityTransform

from nbdist.client.board import palette
from nbdist.client.board.measures import TEXT_PT, TITLE_PT
from nbdist.client.board.palette import Theme
from nbdist.client.board.scales import Floats

BAND_ALPHAS = 0.14, 0.26  # of all ranks, and of the middle 80 % of them


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
    """Return one path of a standing box a rank."""
    return rectangles(at - 0.36, at + 0.36, base, base + height)


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


def part_patch(name: str, theme: Theme, ranks: int) -> Patch:
    """Return how one part of a step looks, in bars and legend; thin bars carry no hatch."""
    color, hatch = palette.PARTS[name]
    over = theme.background or "#ffffff"
    hatch = hatch if ranks <= 2 * palette.MANY else ""
    return Patch(
        facecolor=color, edgecolor=over, linewidth=0, label=palette.part_label(name), hatch=hatch
    )


def area(x: Floats, low: Floats, high: Floats, color: str, alpha: float) -> PathPatch:
    """Return the area between two lines."""
    edge_x, edge_y = np.concatenate([x, x[::-1]]), np.concatenate([low, high[::-1]])
    outline = Path(np.stack([edge_x, edge_y], axis=1), closed=False)
    return PathPatch(outline, facecolor=color, alpha=alpha, linewidth=0)


class Pen(Line2D):
    """A line that is drawn in half of a `Line2D`'s time while it has no markers.

    What stays from frame to frame is prepared once: neither looks nor axes may change after the
    first. Its axes are linear.
    """

    def __init__(self, color: str, dashes: tuple[float, ...], width: float, alpha: float) -> None:
        super().__init__(
            [], [], color=color, linewidth=width, alpha=alpha, markersize=3.0, marker=""
        )
        self.set_solid_capstyle("round")
        if dashes:
            self.set_dashes(dashes)
        self._dashes = [width * length for length in dashes] or None
        self._looks: GraphicsContextBase | None = None

    def draw(self, renderer: RendererBase) -> None:
        """Draw the line; called by matplotlib."""
        if self.get_marker():
            super().draw(renderer)
            return
        if self._looks is None:
            self._looks = self._prepared(renderer)
        points = self.get_transform().transform(np.stack(self.get_data(orig=True), axis=1))
        renderer.draw_path(self._looks, Path(points), IdentityTransform())

    def _prepared(self, renderer: RendererBase) -> GraphicsContextBase:
        looks = renderer.new_gc()
        looks.set_foreground(to_rgba(self.get_color(), self.get_alpha()), isRGBA=True)
        looks.set_linewidth(float(self.get_linewidth()))
        is_solid = self._dashes is None
        looks.set_capstyle(self.get_solid_capstyle() if is_solid else self.get_dash_capstyle())
        looks.set_joinstyle(self.get_solid_joinstyle() if is_solid else self.get_dash_joinstyle())
        looks.set_dashes(0, self._dashes)
        looks.set_clip_rectangle(self.get_clip_box())
        return looks


def pen(color: str, dashes: tuple[float, ...], width: float, alpha: float) -> Pen:
    """Return a line without points; making one costs as much as drawing it."""
    return Pen(color, dashes, width, alpha)


def note(x: float, y: float, words: str, theme: Theme, **options: Any) -> Text:
    """Return a word in a plot, in its data's coordinates unless a transform is given."""
    options = {"color": theme.text, "fontsize": TEXT_PT, "va": "center", **options}
    return Text(x, y, words, **options)


def path(
    x: Floats, y: Floats, color: str, dashes: tuple[float, ...], width: float, alpha: float
) -> Line2D:
    """Return a line through the points."""
    line = pen(color, dashes, width, alpha)
    line.set_data(x, y)
    return line


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
    line = pen(color, dashes, width, 1.0)
    line.set_label(label)
    return line


def nothing_yet(axes: Axes, words: str, theme: Theme) -> None:
    """Say in an empty plot why it is empty; drawn with the axes."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines["bottom"].set_visible(False)
    axes.text(
        0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", fontsize=TITLE_PT,
        color=theme.text,
    )  # fmt: skip


def title(axes: Axes, text: str, theme: Theme, pad: float = 8) -> None:
    """Write a plot's title, `pad` points above it; drawn with the axes."""
    axes.set_title(
        text, loc="left", fontsize=TITLE_PT, color=theme.text, fontweight="bold", pad=pad
    )
