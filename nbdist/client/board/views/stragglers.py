"""The slow ranks: the work of each rank beside its peers', or why no rank stands out.

Where a link is what is slow, links are shown instead.
"""

from typing import TYPE_CHECKING

from nbdist.client.board import sentences
from nbdist.client.board.drawn.measures import MARGIN_PX, TITLE_PT, wrapped
from nbdist.client.board.tables import ViewTable
from nbdist.client.board.text import slower
from nbdist.client.metrics.analysis.advice import cause_of

if TYPE_CHECKING:  # for their types alone: they load numpy and matplotlib
    from nbdist.client.board.drawn.page import Page
    from nbdist.client.board.scene.scene import Scene

NAME, CAPTION = "verdicts", "Step time without communication"
HELP = "which ranks slow the others down, and why"
SHOWS_VERDICTS = True

LINE_PX, ABOVE_PX, PLOT_PX, BELOW_PX = 18, 34, 180, 38
LEFT_PX, RIGHT_PX = 44, 132
LINKS_LEFT_PX = 72


def height(scene: "Scene", width: int) -> int:
    """Return the height of the page."""
    return (
        LINE_PX * len(_lines(scene, width))
        + 8
        + (ABOVE_PX + PLOT_PX + BELOW_PX) * len(_shown(scene))
    )


def compose(page: "Page", scene: "Scene") -> None:
    """Put a bar for each rank, for each link, or both; above them why there is no verdict."""
    from nbdist.client.board.drawn.artists import nothing_yet
    from nbdist.client.board.drawn.plots.links import draw_links
    from nbdist.client.board.drawn.plots.own_work import draw_own_work

    lines = _lines(scene, page.width)
    for place, line in enumerate(lines):
        page.write(MARGIN_PX, page.top + LINE_PX * (place + 0.6), line, size=TITLE_PT)
    top = LINE_PX * len(lines) + 8 + ABOVE_PX
    for what in _shown(scene):
        left = LINKS_LEFT_PX if what == "links" else LEFT_PX
        axes = page.axes(left, top, page.width - left - RIGHT_PX, PLOT_PX)
        if scene.stack is None:
            nothing_yet(axes, "No step has completed yet.", page.theme)
        elif what == "links":
            draw_links(axes, page.theme, scene)
        elif not scene.is_timed:
            nothing_yet(axes, "So step time without communication is unknown.", page.theme)
        else:
            draw_own_work(axes, page.theme, scene, scene.stack)
        top += ABOVE_PX + PLOT_PX + BELOW_PX


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
    from nbdist.client.board.drawn.plots.links import rates_of

    causes = {verdict.cause for verdict in scene.analysis.verdicts}
    if "link" not in causes or not rates_of(scene):
        return ("work",)
    return ("links",) if causes == {"link"} else ("work", "links")


def _lines(scene: "Scene", width: int) -> list[str]:
    """Return why there is no verdict; one has its block."""
    if scene.analysis.verdicts:
        return []
    return [line for said in sentences.verdicts(scene) for line in wrapped(said, width)]
