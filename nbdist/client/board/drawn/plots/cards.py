"""One rank in a card: the time of its steps, under what is known of it in words."""

import math

from matplotlib.axes import Axes

from nbdist.client.board import palette
from nbdist.client.board.drawn.artists import note, path, put
from nbdist.client.board.drawn.measures import TEXT_PT
from nbdist.client.board.drawn.page import Page
from nbdist.client.board.scales import Limits, bulk_limits, decimate, padded
from nbdist.client.board.scene.scene import Row, Scene
from nbdist.shared.text import figure, name_bytes

PLOT_PX = 56


def shared_limits(scene: Scene) -> Limits:
    """Return the scale of milliseconds that cards share, so that they can be compared."""
    lines = [] if scene.paces is None else [line.y for line in scene.paces.lines]
    needed = bulk_limits(lines, 0.0)
    return padded(needed, 0.0) if needed else (0.0, 1.0)


def draw_card(axes: Axes, page: Page, scene: Scene, place: int, limits: Limits) -> None:
    """Draw the rank of the scene's row at `place`."""
    row = scene.rows[place]
    axes.set_xticks([])
    axes.set_xlim(0, 1)
    axes.set_ylim(*limits)
    axes.set_yticks([0, _round_below(limits[1])])
    axes.tick_params(labelsize=TEXT_PT)
    state = [scene.state(row)] + ([f"step {row.step:,}"] if row.step else [])
    put(
        axes,
        [
            note(x, 1 + above_px / PLOT_PX, words, page.theme, transform=axes.transAxes, **looks)
            for x, above_px, words, looks in (
                (0, 42, f"rank {row.rank}  {row.device}", {"fontweight": "bold"}),
                (1, 42, "  ".join(state), {"ha": "right"}),
                (0, 26, _pace(row), {}),
                (0, 10, _memory(row), {}),
            )
        ],
    )
    color, _ = palette.line_style(place)
    for line in () if scene.paces is None else scene.paces.lines:
        if line.rank == row.rank:
            at, values = decimate(line.x, line.y, max(40, int(page.width * page.scale) // 12))
            share = (at - at[0]) / max(float(at[-1] - at[0]), 1.0)  # from edge to edge
            drawn = path(share, values, color, (), 1.2, 1.0)
            drawn.set_marker("o" if len(at) == 1 else "")
            put(axes, [drawn])


def _pace(row: Row) -> str:
    pace = [f"{figure(row.steps_per_s)} steps/s"] if row.steps_per_s else []
    if row.tokens_per_s:
        pace.append(f"{figure(row.tokens_per_s)} tokens/s")
    elif row.samples_per_s:
        pace.append(f"{figure(row.samples_per_s)} samples/s")
    return "  ".join(pace)


def _memory(row: Row) -> str:
    memory = [name_bytes(row.memory_bytes)] if row.memory_bytes is not None else []
    if row.cuda_bytes is not None:
        memory.append(f"{name_bytes(row.cuda_bytes)} on the device")
    return "  ".join(memory)


def _round_below(value: float) -> float:
    """Return a round number that is seen below `value`."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * lead for lead in (5, 2, 1) if power * lead <= value)
