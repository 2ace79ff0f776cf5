"""Loss by rank and its mean over the ranks, with what the user logs beside it."""

from nbdist.client.board import palette
from nbdist.client.board.artists import nothing_yet, rank_samples, sample
from nbdist.client.board.page import LEFT_PX, RIGHT_PX, Page, Plot
from nbdist.client.board.plots import LinePlot
from nbdist.client.board.scene import Scene
from nbdist.wire import STEP_KEYS

LEGEND_PX, LOSS_PX, OWN_PX = 30, 330, 200
ABOVE_PX, BELOW_PX, GAP_PX = 24, 38, 48


def plan(scene: Scene, final: bool) -> tuple[object, ...]:
    """Return which plots there are."""
    return tuple(_keys(scene)), scene.ranks


def height(scene: Scene, final: bool) -> int:
    """Return the height of the page."""
    return LEGEND_PX + LOSS_PX + (OWN_PX if len(_keys(scene)) > 1 else 0)


def compose(page: Page, scene: Scene) -> list[Plot]:
    """Put the loss over the whole width, and own numbers below it."""
    keys = _keys(scene)
    whole = page.width - LEFT_PX - RIGHT_PX
    axes = page.axes(LEFT_PX, LEGEND_PX + ABOVE_PX, whole, LOSS_PX - ABOVE_PX - BELOW_PX)
    if not keys:
        nothing_yet(axes, "No loss has been seen yet.", page.theme)
        return []
    own = keys[1:]
    width_px = int(whole * page.scale)
    has_mean = 1 < len(scene.ranks) <= palette.MANY  # many have a median already
    plots: list[Plot] = [
        LinePlot(
            axes, scene.panel(keys[0]), scene.ranks, page.theme, width_px, page.is_final,
            with_mean=has_mean, smoothing=page.smoothing,
        )
    ]  # fmt: skip
    width = (whole - GAP_PX * (len(own) - 1)) / max(1, len(own))
    for column, key in enumerate(own):
        left = LEFT_PX + column * (width + GAP_PX)
        axes = page.axes(left, LEGEND_PX + LOSS_PX + 18, width, OWN_PX - 18 - BELOW_PX)
        width_px = int(width * page.scale)
        panel = scene.panel(key)
        plots.append(LinePlot(axes, panel, scene.ranks, page.theme, width_px, page.is_final))
    mean = [sample("mean of all", page.theme.text, (), 2.4)] if has_mean else []
    page.legend([*rank_samples(scene.ranks, page.theme), *mean], "left")
    return plots


def _keys(scene: Scene) -> list[str]:
    """Return the panels to show: the loss first, then the gradient's norm and the user's own."""
    keys = [panel.key for panel in scene.panels]
    norm = [] if scene.norm is None else [scene.norm.key]
    return [k for k in keys if k == "loss"] + norm + [k for k in keys if k not in STEP_KEYS]
