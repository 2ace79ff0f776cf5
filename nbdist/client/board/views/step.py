"""Where a step's time goes: a lying bar of its parts for each rank, and for whom it waits.

More ranks than `MOST_BARS` are strips, one a part, with the extremes named.
"""

from typing import TYPE_CHECKING

from nbdist.client.board import palette
from nbdist.client.board.measures import LEGEND_PX, LINE_PX, WIDE, legend_rows
from nbdist.client.board.sentences import NOT_TIMED
from nbdist.client.board.tables import NONE, ViewTable
from nbdist.shared.text import figure, milliseconds

if TYPE_CHECKING:  # for their types alone: they load numpy and matplotlib
    from nbdist.client.board.page import Page, Plot
    from nbdist.client.board.scene import Scene, Stack

NAME, CAPTION = "step", "Step-time breakdown"
HELP = "where a step's time goes on each rank, and who waits for whom"
HISTORIES: tuple[str, ...] = ()
HAS_SMOOTHING, SHOWS_VERDICTS = False, False

MOST_BARS = 16
HEADS = {"hidden": "hidden communication"}  # of the table
ABOVE_PX, BELOW_PX = 26, 36
BAR_PX, STRIP_PX = 26, 34  # thick bars for few ranks, so that hatches are seen
NAMES_PX, WORDS_PX = 70, 226  # left and right of the bars
STRIP_NAMES_PX, STRIP_WORDS_PX, STRIPS_ABOVE_PX = 76, 258, 44


def plan(scene: "Scene", final: bool) -> tuple[object, ...]:
    """Return the ranks and the parts."""
    stack = scene.stack
    if stack is None:
        return ()
    return stack.ranks, tuple(stack.parts), stack.seen(final), bool(stack.waits_for)


def height(scene: "Scene", final: bool, width: int = WIDE) -> int:
    """Return the height of the page."""
    stack = scene.stack
    if stack is None:
        return 120
    if len(stack.ranks) > MOST_BARS:
        return STRIPS_ABOVE_PX + STRIP_PX * (len(stack.seen(final)) + 1) + BELOW_PX
    bars = _bar_px(len(stack.ranks)) * len(stack.ranks)
    return _legend_px(stack, final, width) + ABOVE_PX + bars + BELOW_PX


def compose(page: "Page", scene: "Scene") -> "list[Plot]":
    """Put a bar for each rank, or a strip for each part."""
    from nbdist.client.board.artists import nothing_yet, part_patch
    from nbdist.client.board.plots.step_bars import LyingBars

    stack = scene.stack
    if stack is None:
        axes = page.axes(20, 10, page.width - 40, 100)
        nothing_yet(axes, "No step has completed yet.", page.theme)
        return []
    if len(stack.ranks) > MOST_BARS:
        return [_strips(page, stack)]
    words_px = WORDS_PX if stack.waits_for else 76
    width = page.width - NAMES_PX - words_px
    tall = _bar_px(len(stack.ranks)) * len(stack.ranks)
    above = _legend_px(stack, page.is_final, page.width) + ABOVE_PX
    axes = page.axes(NAMES_PX, above, width, tall)
    handles = [part_patch(name, page.theme, len(stack.ranks)) for name in stack.seen(page.is_final)]
    page.legend(handles, "left")
    return [LyingBars(axes, page.theme, stack, page.is_final)]


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


def _strips(page: "Page", stack: "Stack") -> "Plot":
    from nbdist.client.board.artists import title
    from nbdist.client.board.plots.strips import Strip, StripsPlot

    seen = stack.seen(page.is_final)

    def read(scene: "Scene") -> list[Strip]:
        now = scene.stack
        assert now is not None  # it is why there is this plot
        whole = Strip("step", page.theme.text, now.whole_ms, _write)
        return [whole] + [
            Strip(name, palette.PARTS[name][0], now.parts[name], _write) for name in seen
        ]

    names = ["step", *seen]
    width = page.width - STRIP_NAMES_PX - STRIP_WORDS_PX
    axes = page.axes(STRIP_NAMES_PX, STRIPS_ABOVE_PX, width, STRIP_PX * len(names))
    words = "step time by part, shaded from 0 to its most"
    if "hidden" in seen:
        words += f"\nhidden: {palette.part_label('hidden')}"
    title(axes, words, page.theme, pad=4)
    return StripsPlot(axes, page.theme, stack.ranks, names, read)


def _write(value: float) -> str:
    return f"{figure(value)} ms"


def _legend_px(stack: "Stack", final: bool, width: int) -> int:
    labels = [palette.part_label(name) for name in stack.seen(final)]
    return LEGEND_PX + LINE_PX * (legend_rows(labels, width) - 1)


def _bar_px(ranks: int) -> int:
    return BAR_PX if ranks > 4 else 40
