"""The overview: loss, communication, the split of a step, and what the user logs."""

import math
from typing import TYPE_CHECKING

from nbdist.client.board import palette
from nbdist.client.board.drawn.measures import (
    LEFT_PX,
    LEGEND_PX,
    LINE_PX,
    RIGHT_PX,
    fit_beside,
    is_narrow,
    legend_rows,
)
from nbdist.client.board.tables import NONE, ViewTable, or_dash
from nbdist.shared.text import figure, name_ranks
from nbdist.shared.wire import STEP_KEYS

if TYPE_CHECKING:  # for their types alone: they load numpy and matplotlib
    from nbdist.client.board.drawn.page import Page
    from nbdist.client.board.scene.scene import Row, Scene

NAME, CAPTION = "overview", ""
HELP = "loss, communication, and what a step is made of"
SHOWS_VERDICTS = False

ROW_PX = 236  # one row of plots
ABOVE_PX, BELOW_PX = 24, 38  # of a plot: its title; ticks and label
GAP_PX = 48
PER_ROW = 3
MUCH_DATA_PCT = 20.0  # of a step: from here on the loader is worth a word


def height(scene: "Scene", width: int) -> int:
    """Return the height of the page."""
    rows, _ = _grid(scene, width)
    return _legends_px(scene, width)[1] + rows * ROW_PX


def compose(page: "Page", scene: "Scene") -> None:
    """Put lines and bars side by side, at most three in a row, or below each other."""
    from nbdist.client.board.drawn.artists import part_samples, rank_samples
    from nbdist.client.board.drawn.plots.lines import LinePlot
    from nbdist.client.board.drawn.plots.split import draw_split

    _, columns = _grid(scene, page.width)
    parts_px, legends_px = _legends_px(scene, page.width)
    stack = scene.stack
    width = (page.width - LEFT_PX - RIGHT_PX - GAP_PX * (columns - 1)) / columns
    for index, key in enumerate(_order(scene)):
        row, column = divmod(index, columns)
        left = LEFT_PX + column * (width + GAP_PX)
        top = legends_px + row * ROW_PX + ABOVE_PX
        axes = page.axes(left, top, width, ROW_PX - ABOVE_PX - BELOW_PX)
        if key is None:
            assert stack is not None  # `_order` has looked
            draw_split(axes, page.theme, stack)
        else:
            LinePlot(axes, scene.panel(key), scene, page.theme, int(width * page.scale))
    if scene.panels:
        page.legend(rank_samples(scene.ranks, page.theme), "left")
    if stack is not None:
        parts = part_samples(stack.seen, page.theme, len(scene.rows))
        page.legend(parts, "left" if is_narrow(page.width) else "right", parts_px)


def sentence(scene: "Scene") -> str:
    """Return the step, the loss, what a step waits for, and who makes others wait."""
    of = f" ({scene.epoch})" if scene.epoch is not None and scene.outcome is None else ""
    parts = [f"Step {scene.step:,}{of}" if scene.last_step else "Logging"]
    losses = scene.losses
    if losses:
        bad = [rank for rank, loss in losses.items() if not math.isfinite(loss)]
        mean = sum(losses.values()) / len(losses)
        parts.append(f"loss not finite on {name_ranks(bad)}" if bad else f"loss {figure(mean)}")
    if scene.comm_pct is not None:
        parts.append(f"{scene.comm_pct:.0f} % of a step in communication")
    elif not scene.is_timed:
        parts.append("communication not measured")
    if (data_pct := scene.data_pct or 0.0) >= MUCH_DATA_PCT:
        most = max(scene.making_ms.items(), key=lambda part: part[1], default=None)
        mostly = "" if most is None else f" (mostly {most[0]})"
        parts.append(f"{data_pct:.0f} % waiting for data{mostly}")
    if scene.slow:
        verb = "makes" if len(scene.slow) == 1 else "make"
        whom = "each other" if scene.slow >= set(scene.ranks) else "the others"
        parts.append(f"{name_ranks(scene.slow)} {verb} {whom} wait")
    return ", ".join(parts) + "."


def table(scene: "Scene") -> ViewTable:
    """Return each rank's progress, speed, and what the user logs."""
    own = sorted({key for row in scene.rows for key in row.own})[:4]
    slow = "◀ they wait for each other" if scene.slow >= set(scene.ranks) else "◀ the others wait"
    unknown = NONE if scene.is_timed else "not measured"
    head = ("rank", "device", "step", "loss", "steps/s", "step ms", "comm %", "data %", *own, "")

    def cells(row: "Row") -> tuple[str, ...]:
        return (
            str(row.rank),
            row.device,
            f"{row.step:,}",
            *map(or_dash, (row.loss, row.steps_per_s, row.step_ms)),
            unknown if row.comm_pct is None else _whole(row.comm_pct),
            or_dash(row.data_pct, _whole),
            *(or_dash(row.own.get(key)) for key in own),
            # Last, so that the columns stay where they are when it comes and goes.
            slow if row.rank in scene.slow else "",
        )

    return ViewTable("Ranks, over their last steps", head, tuple(map(cells, scene.rows)))


def _whole(value: float) -> str:
    return f"{value:.0f}"


def _legends_px(scene: "Scene", width: int) -> tuple[int, int]:
    """Return where the parts' legend begins, below the ranks' where both do not fit, and ends."""
    ranks = palette.rank_labels(scene.ranks) if scene.panels else []
    seen = () if scene.stack is None else scene.stack.seen
    parts = [palette.part_label(name) for name in seen]
    if fit_beside(ranks, parts, width):
        return 0, LEGEND_PX
    begin = LINE_PX * (legend_rows(ranks, width) if ranks else 0)
    return begin, LEGEND_PX + begin + LINE_PX * (legend_rows(parts, width) - 1)


def _grid(scene: "Scene", width: int) -> tuple[int, int]:
    """Return rows and columns of plots."""
    count = max(1, len(scene.panels) + (scene.stack is not None))
    if is_narrow(width):
        return count, 1
    columns = min(count, PER_ROW) if count != 4 else 2
    return math.ceil(count / columns), columns


def _order(scene: "Scene") -> list[str | None]:
    """Return what to plot: the keys of lines, and None for the split, before the user's metrics."""
    keys = [panel.key for panel in scene.panels]
    split: list[str | None] = [None] if scene.stack is not None else []
    return [k for k in keys if k in STEP_KEYS] + split + [k for k in keys if k not in STEP_KEYS]
