"""Loss by rank and its mean over the ranks, with what the user logs beside it."""

import math
from typing import TYPE_CHECKING

from nbdist.client.board import palette
from nbdist.client.board.drawn.measures import (
    LEFT_PX,
    LEGEND_PX,
    LINE_PX,
    RIGHT_PX,
    is_narrow,
    legend_rows,
)
from nbdist.client.board.tables import ViewTable, or_dash
from nbdist.shared.text import figure, name_ranks
from nbdist.shared.wire import STEP_KEYS

if TYPE_CHECKING:  # for their types alone: they load numpy and matplotlib
    from nbdist.client.board.drawn.page import Page
    from nbdist.client.board.scene.scene import Scene

NAME, CAPTION = "loss", "Loss"
HELP = "of each rank, and their mean"
SHOWS_VERDICTS = False

LOSS_PX, OWN_PX = 330, 200
ABOVE_PX, BELOW_PX, GAP_PX = 24, 38, 48
MEAN = "mean of all"


def height(scene: "Scene", width: int) -> int:
    """Return the height of the page."""
    own = len(_keys(scene)) - 1
    rows = own if is_narrow(width) else min(own, 1)
    return _legend_px(scene, width) + LOSS_PX + OWN_PX * max(0, rows)


def compose(page: "Page", scene: "Scene") -> None:
    """Put the loss over the whole width, and own numbers below it."""
    from nbdist.client.board.drawn.artists import nothing_yet, rank_samples, sample
    from nbdist.client.board.drawn.plots.lines import LinePlot

    keys = _keys(scene)
    whole = page.width - LEFT_PX - RIGHT_PX
    legend_px = _legend_px(scene, page.width)
    axes = page.axes(LEFT_PX, legend_px + ABOVE_PX, whole, LOSS_PX - ABOVE_PX - BELOW_PX)
    if not keys:
        nothing_yet(axes, "No loss has been recorded yet.", page.theme)
        return
    own = keys[1:]
    width_px = int(whole * page.scale)
    with_mean = _has_mean(scene)
    LinePlot(axes, scene.panel(keys[0]), scene, page.theme, width_px, with_mean=with_mean)
    columns = 1 if is_narrow(page.width) else max(1, len(own))
    width = (whole - GAP_PX * (columns - 1)) / columns
    for place, key in enumerate(own):
        row, column = divmod(place, columns)
        left = LEFT_PX + column * (width + GAP_PX)
        top = legend_px + LOSS_PX + OWN_PX * row + 18
        axes = page.axes(left, top, width, OWN_PX - 18 - BELOW_PX)
        LinePlot(axes, scene.panel(key), scene, page.theme, int(width * page.scale))
    mean = [sample(MEAN, page.theme.text, (), 2.4)] if with_mean else []
    page.legend([*rank_samples(scene.ranks, page.theme), *mean], "left")


def sentence(scene: "Scene") -> str:
    """Return the mean loss, and its range over the ranks."""
    losses = scene.losses
    if not losses:
        return "No loss has been recorded yet."
    bad = [rank for rank, loss in losses.items() if not math.isfinite(loss)]
    if bad:
        return f"Step {scene.step:,}: the loss of {name_ranks(bad)} is not finite."
    high, low = max(losses, key=losses.__getitem__), min(losses, key=losses.__getitem__)
    text = f"Step {scene.step:,}: loss {figure(sum(losses.values()) / len(losses))}"
    least, most = figure(losses[low]), figure(losses[high])
    if least != most:
        text += f", from {least} on rank {low} to {most} on rank {high}"
    return text + "."


def table(scene: "Scene") -> ViewTable:
    """Return each rank's loss, now and over the last steps."""
    rows = []
    for line in next((panel.lines for panel in scene.panels if panel.key == "loss"), ()):
        known = [value for value in line.y.tolist() if math.isfinite(value)]
        recent = known[-50:]
        rows.append(
            (
                str(line.rank),
                f"{int(line.x[-1]):,}",
                or_dash(float(line.y[-1])),
                or_dash(sum(recent) / len(recent) if recent else None),
                or_dash(min(known, default=None)),
                f"{len(line.y) - len(known):,}",
            )
        )
    head = ("rank", "step", "loss", "mean of last 50", "lowest", "not finite")
    return ViewTable("Loss by rank", head, tuple(rows))


def _has_mean(scene: "Scene") -> bool:
    return 1 < len(scene.ranks) <= palette.MANY  # many have a median already


def _legend_px(scene: "Scene", width: int) -> int:
    labels = [*palette.rank_labels(scene.ranks), *([MEAN] if _has_mean(scene) else [])]
    return LEGEND_PX + LINE_PX * (legend_rows(labels, width) - 1)


def _keys(scene: "Scene") -> list[str]:
    """Return the panels to show: loss, the gradient's norm, then the user's metrics."""
    keys = [panel.key for panel in scene.panels]
    norm = [] if scene.norm is None else [scene.norm.key]
    return [k for k in keys if k == "loss"] + norm + [k for k in keys if k not in STEP_KEYS]
