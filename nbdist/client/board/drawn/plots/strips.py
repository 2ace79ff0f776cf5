"""Many ranks at a glance: one strip a number, one cell a rank, the extremes named.

Bars of 64 ranks are a comb. A strip is shaded from nothing to its own greatest value, so what
differs between ranks is seen, and the words beside it say how much it is and where.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.image import AxesImage
from matplotlib.patches import PathPatch

from nbdist.client.board.drawn.artists import note, put, rectangles
from nbdist.client.board.drawn.measures import LETTER_PX
from nbdist.client.board.palette import Theme
from nbdist.client.board.scales import Floats

HEIGHT, FAINTEST = 0.74, 0.1  # of a strip in its row; how much is seen of a zero


@dataclass(frozen=True, slots=True, eq=False)
class Strip:
    """One number of all ranks; `values` hold nan where a rank has not said."""

    name: str
    color: str
    values: Floats
    write: Callable[[float], str]


def draw_strips(
    axes: Axes,
    theme: Theme,
    ranks: Sequence[int | str],
    strips: Sequence[Strip],
    label: str = "rank",
) -> None:
    """Draw strips below each other, ranks, or what else `label` says, from left to right."""
    width_px = axes.bbox.width / axes.figure.dpi * 100
    most = min(16.0, width_px / (LETTER_PX * len(str(ranks[-1])) + 8))
    every = 1 << max(0, int(np.ceil(np.log2(len(ranks) / most))))
    shown = range(0, len(ranks), every)
    axes.set_xticks(list(shown), [str(ranks[i]) for i in shown])
    axes.set_xlim(-0.5, len(ranks) - 0.5)
    axes.set_ylim(len(strips) - 0.5, -0.5)
    axes.set_yticks(range(len(strips)), [strip.name for strip in strips])
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.set_xlabel(label, color=theme.text, fontsize=8, labelpad=1)
    beside = axes.get_yaxis_transform()
    for row, strip in enumerate(strips):
        words = note(1.015, row, extremes(ranks, strip), theme, transform=beside)
        put(axes, [_image(axes, row, strip), words])
    put(axes, [_frames(len(strips), len(ranks), theme)])


def _image(axes: Axes, row: int, strip: Strip) -> AxesImage:
    most = float(np.nanmax(strip.values)) if np.isfinite(strip.values).any() else 0.0
    shares = np.clip(np.nan_to_num(strip.values / most if most > 0 else strip.values), 0, 1)
    cells = np.empty((1, len(strip.values), 4))
    cells[0, :, :3] = to_rgb(strip.color)
    cells[0, :, 3] = FAINTEST + (1 - FAINTEST) * shares
    cells[0, ~np.isfinite(strip.values), 3] = 0.0
    extent = (-0.5, len(strip.values) - 0.5, row + HEIGHT / 2, row - HEIGHT / 2)
    image = AxesImage(axes, interpolation="nearest", extent=extent)
    image.set_data(cells)
    return image


def _frames(count: int, ranks: int, theme: Theme) -> PathPatch:
    """Return a line around each strip: of a pale one it is what is seen."""
    at = np.arange(count, dtype=np.float64)
    ends = np.full(count, -0.5), np.full(count, ranks - 0.5)
    outline = rectangles(*ends, at - HEIGHT / 2, at + HEIGHT / 2)
    return PathPatch(outline, facecolor="none", edgecolor=theme.text, linewidth=0.8)


def extremes(ranks: Sequence[int | str], strip: Strip) -> str:
    """Return the middle and the extremes in words, with the ranks they are on."""
    known = np.flatnonzero(np.isfinite(strip.values))
    if not len(known):
        return "not known"
    values = strip.values[known]
    high, low = known[int(values.argmax())], known[int(values.argmin())]
    middle = strip.write(float(np.median(values)))
    if strip.write(float(values.max())) == strip.write(float(values.min())):
        return f"{middle} on all"
    most, least = strip.write(float(values.max())), strip.write(float(values.min()))
    return f"median {middle}\nmost {most} on {ranks[high]}, least {least} on {ranks[low]}"
