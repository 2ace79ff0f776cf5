"""The slow ranks: the work of each rank beside its peers', or why no rank stands out.

Where a link is what is slow, links are shown instead.
"""

from typing import TYPE_CHECKING

from nbdist.client.board import sentences
from nbdist.client.board.measures import MARGIN_PX, TITLE_PT, WIDE, wrapped
from nbdist.client.board.tables import ViewTable
from nbdist.client.board.text import slower
from nbdist.client.metrics.analysis.advice import cause_of

if TYPE_CHECKING:  # for their types alone: they load numpy and matplotlib
    from nbdist.client.board.page import Page, Plot
    from nbdist.client.board.scene import Scene

NAME, CAPTION = "verdicts", "Step time without communication"
HELP = "which ranks slow the others down, and why"
HISTORIES: tuple[str, ...] = ()
HAS_SMOOTHING, SHOWS_VERDICTS = False, True

LINE_PX, ABOVE_PX, PLOT_PX, BELOW_PX = 18, 34, 180, 38
LEFT_PX, RIGHT_PX = 44, 132
LINKS_LEFT_PX = 72


def plan(scene: "Scene", final: bool) -> tuple[object, ...]:
    """Return the ranks, and what a picture that stays says itself."""
    stack = scene.stack
    ranks = () if stack is None else stack.ranks
    return (ranks, scene.is_timed, *_shown(scene), *_lines(scene, final, WIDE))


def height(scene: "Scene", final: bool, width: int = WIDE) -> int:
    """Return the height of the page."""
    return (
        LINE_PX * len(_lines(scene, final, width))
        + 8
        + (ABOVE_PX + PLOT_PX + BELOW_PX) * len(_shown(scene))
    )


def compose(page: "Page", scene: "Scene") -> "list[Plot]":
    """Put a bar for each rank, for each link, or both; above them why there is no verdict."""
    from nbdist.client.board.artists import nothing_yet
    from nbdist.client.board.plots.links import LinkBars
    from nbdist.client.board.plots.own_work import OwnWork

    lines = _lines(scene, page.is_final, page.width)
    for place, line in enumerate(lines):
        page.write(MARGIN_PX, page.top + LINE_PX * (place + 0.6), line, size=TITLE_PT)
    top = LINE_PX * len(lines) + 8 + ABOVE_PX
    plots: list[Plot] = []
    for what in _shown(scene):
        left = LINKS_LEFT_PX if what == "links" else LEFT_PX
        axes = page.axes(left, top, page.width - left - RIGHT_PX, PLOT_PX)
        if scene.stack is None:
            nothing_yet(axes, "No step has completed yet.", page.theme)
        elif what == "links":
            plots.append(LinkBars(axes, page.theme, scene.ranks))
        elif not scene.is_timed:
            nothing_yet(axes, "So step time without communication is unknown.", page.theme)
        else:
            plots.append(OwnWork(axes, page.theme, scene.stack, page.is_final))
        top += ABOVE_PX + PLOT_PX + BELOW_PX
    return plots


def sentence(scene: "Scene") -> str:
    """Return the verdicts, or why there is none."""
    return " ".join(sentences.verdicts(scene))


def table(scene: "Scene") -> ViewTable:
    """Return the verdicts' numbers; their sentences are above."""
    head = ("rank", "slower by", "cause", "since step")
    rows = tuple(
        (str(v.rank), slower(v.share), cause_of(v), f"{v.since_step:,}")
        for v in scene.analysis.verdicts
    )
    return ViewTable("Ranks that slow the others down", head, rows)


def _shown(scene: "Scene") -> tuple[str, ...]:
    """Return what there is to show: "work", "links", or one above the other."""
    from nbdist.client.board.plots.links import rates_of

    causes = {verdict.cause for verdict in scene.analysis.verdicts}
    if "link" not in causes or not rates_of(scene):
        return ("work",)
    return ("links",) if causes == {"link"} else ("work", "links")


def _lines(scene: "Scene", final: bool, width: int) -> list[str]:
    """Return why there is no verdict; one has its block, and live words are HTML."""
    if not final or scene.analysis.verdicts:
        return []
    return [line for said in sentences.verdicts(scene) for line in wrapped(said, width)]
