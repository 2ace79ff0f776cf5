"""Where a step's time goes: a lying bar of its parts for each rank, and for whom it waits.

More ranks than `MOST_BARS` are strips, one a part, with the extremes named.
"""

from typing import TYPE_CHECKING

from nbdist.client.board import palette
from nbdist.client.board.drawn.measures import LEGEND_PX, LINE_PX, legend_rows
from nbdist.client.board.sentences import NOT_TIMED
from nbdist.client.board.tables import NONE, ViewTable
from nbdist.shared.text import figure, milliseconds

if TYPE_CHECKING:  # for their types alone: they load numpy and matplotlib
    from nbdist.client.board.drawn.page import Page
    from nbdist.client.board.scene.scene import Scene, Stack

NAME, CAPTION = "step", "Step-time breakdown"
HELP = "where a step's time goes on each rank, and who waits for whom"
SHOWS_VERDICTS = False

MOST_BARS = 16
HEADS = {"hidden": "hidden communication"}  # of the table
ABOVE_PX, BELOW_PX = 26, 36
BAR_PX, STRIP_PX = 26, 34  # thick bars for few ranks, so that hatches are seen
NAMES_PX, WORDS_PX = 70, 226  # left and right of the bars
STRIP_NAMES_PX, STRIP_WORDS_PX, STRIPS_ABOVE_PX = 76, 258, 44


def height(scene: "Scene", width: int) -> int:
    """Return the height of the page."""
    stack = scene.stack
    if stack is None:
        return 120
    if len(stack.ranks) > MOST_BARS:
        return STRIPS_ABOVE_PX + STRIP_PX * (len(stack.seen) + 1) + BELOW_PX
    bars = _bar_px(len(stack.ranks)) * len(stack.ranks)
    return _legend_px(stack, width) + ABOVE_PX + bars + BELOW_PX


def compose(page: "Page", scene: "Scene") -> None:
    """Put a bar for each rank, or a strip for each part."""
    from nbdist.client.board.drawn.artists import nothing_yet, part_samples
    from nbdist.client.board.drawn.plots.step_bars import draw_lying_bars

    stack = scene.stack
    if stack is None:
        axes = page.axes(20, 10, page.width - 40, 100)
        nothing_yet(axes, "No step has completed yet.", page.theme)
        return
    if len(stack.ranks) > MOST_BARS:
        _strips(page, stack)
        return
    words_px = WORDS_PX if stack.waits_for else 76
    width = page.width - NAMES_PX - words_px
    tall = _bar_px(len(stack.ranks)) * len(stack.ranks)
    above = _legend_px(stack, page.width) + ABOVE_PX
    axes = page.axes(NAMES_PX, above, width, tall)
    page.legend(part_samples(stack.seen, page.theme, len(stack.ranks)), "left")
    draw_lying_bars(axes, page.theme, stack)


def sentence(scene: "Scene") -> str:
    """Return the mean length of a step, its parts, and the longest wait."""
    stack = scene.stack
    if stack is None:
        return "No step has completed yet."
    whole = float(stack.whole_ms.mean())
    if not whole:
        return "No step time was measured."
    shares = {name: 100 * float(part.mean()) / whole for name, part in stack.parts.items()}
    parts = [
        f"{share:.0f} % {palette.part_label(name)}"
        for name, share in shares.items()
        if share >= 0.5
    ]
    text = f"A step takes {figure(whole)} ms: {', '.join(parts)}."
    if making := [f"{part} {milliseconds(ms)}" for part, ms in scene.making_ms.items() if ms]:
        text += f" Making its batches takes {', '.join(making)} ms."
    return f"{text} {NOT_TIMED}" if not scene.is_timed else f"{text}{_longest_wait(stack)}"


def _longest_wait(stack: "Stack") -> str:
    if not stack.waits_for:
        return ""
    waiter = max(stack.waits_for, key=lambda rank: stack.waits_for[rank][1])
    awaited, time_ms = stack.waits_for[waiter]
    return f" Rank {waiter} waits longest: {figure(time_ms)} ms per step for rank {awaited}."


def table(scene: "Scene") -> ViewTable:
    """Return the parts of each rank's step."""
    stack = scene.stack
    if stack is None:
        return ViewTable("Step time by rank, ms", ("rank", "step"), ())
    rows = []
    for place, rank in enumerate(stack.ranks):
        waits = stack.waits_for.get(rank)
        rows.append(
            (
                str(rank),
                milliseconds(float(stack.whole_ms[place])),
                *(milliseconds(float(part[place])) for part in stack.parts.values()),
                NONE if waits is None else f"rank {waits[0]}, {figure(waits[1])} ms",
            )
        )
    parts = (HEADS.get(name, name) for name in stack.parts)
    head = ("rank", "step", *parts, "waits for")
    return ViewTable("Step time by rank, ms, mean of the last 50", head, tuple(rows))


def _strips(page: "Page", stack: "Stack") -> None:
    from nbdist.client.board.drawn.artists import title
    from nbdist.client.board.drawn.plots.strips import Strip, draw_strips

    strips = [Strip("step", page.theme.text, stack.whole_ms, _write)]
    for name in stack.seen:
        strips.append(Strip(name, palette.PARTS[name][0], stack.parts[name], _write))
    width = page.width - STRIP_NAMES_PX - STRIP_WORDS_PX
    axes = page.axes(STRIP_NAMES_PX, STRIPS_ABOVE_PX, width, STRIP_PX * len(strips))
    words = "step time by part, shaded from 0 to its most"
    if "hidden" in stack.seen:
        words += f"\nhidden: {palette.part_label('hidden')}"
    title(axes, words, page.theme, pad=4)
    draw_strips(axes, page.theme, stack.ranks, strips)


def _write(value: float) -> str:
    return f"{figure(value)} ms"


def _legend_px(stack: "Stack", width: int) -> int:
    labels = [palette.part_label(name) for name in stack.seen]
    return LEGEND_PX + LINE_PX * (legend_rows(labels, width) - 1)


def _bar_px(ranks: int) -> int:
    return BAR_PX if ranks > 4 else 40
