"""Collectives: the time line of the last steps, and their table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nbdist.client.board import palette
from nbdist.client.board.drawn.measures import (
    LEGEND_PX,
    LINE_PX,
    MARGIN_PX,
    TEXT_PT,
    is_narrow,
    legend_rows,
    wrapped,
)
from nbdist.client.board.scene.lanes import telling_lanes
from nbdist.client.board.tables import NONE, ViewTable, or_dash
from nbdist.client.board.text import count
from nbdist.client.metrics.analysis.values import CollectiveRow
from nbdist.shared.text import counted, figure, milliseconds, name_bytes, name_ranks, name_rate

if TYPE_CHECKING:  # for their types alone: they load numpy and matplotlib
    from nbdist.client.board.drawn.page import Page
    from nbdist.client.board.scene.scene import Scene

NAME, CAPTION = "collectives", "Collectives"
HELP = "a table of them, and a time line of the last steps"
SHOWS_VERDICTS = False

ABOVE_PX, BELOW_PX, NOTE_PX = 46, 26, 18
LANE_PX, FEW_LANES_PX = 42, 60
NAMES_PX, RIGHT_PX = 56, 16
MOST_ROWS, ROW_PX, HEADS_PX = 8, 18, 36
LETTER_PX, COLUMN_PX = 5.7, 10
SHADES = "queueing", "waiting for the last rank", "transferring", "main thread blocked"
# Two lines each, so that eleven columns fit into the width.
HEADS = (
    "kind", "group", "line", "a\nstep", "bytes", "skew\nms", "came last", "waiting\nms",
    "queueing\nms", "transfer\nms", "algbw", "busbw",
)  # fmt: skip
IN_A_NARROW_ONE = 0, 3, 4, 6, 7, 9, 11  # of the columns: what there is room for
LONGEST = 22, 18, 15, 12  # characters of a cell: the first that fits


def height(scene: "Scene", width: int) -> int:
    """Return the height of the page."""
    lanes = len(telling_lanes(scene))
    line = 90
    if lanes:
        notes = NOTE_PX * len(_notes(scene, lanes, width))
        line = _legend_px(width) + ABOVE_PX + _lane_px(lanes) * lanes + BELOW_PX + notes
    rows = len(scene.analysis.table)
    table = HEADS_PX + ROW_PX * (min(rows, MOST_ROWS) + (rows > MOST_ROWS)) + 8 if rows else 0
    return line + table


def compose(page: "Page", scene: "Scene") -> None:
    """Put the lanes, and the table below them."""
    from nbdist.client.board.drawn.artists import nothing_yet
    from nbdist.client.board.drawn.plots import timeline

    lanes = len(telling_lanes(scene))
    line = scene.analysis.line
    if not lanes or line is None:
        axes = page.axes(20, 10, page.width - 40, 70)
        nothing_yet(axes, no_collectives(scene), page.theme)
        _write_table(page, scene, page.top + 90)
        return
    page.legend(timeline.legend(page.theme, SHADES), "left")
    width = page.width - NAMES_PX - RIGHT_PX
    tall = _lane_px(lanes) * lanes
    above = _legend_px(page.width) + ABOVE_PX
    axes = page.axes(NAMES_PX, above, width, tall)
    below = page.top + above + tall + BELOW_PX
    for said in _notes(scene, lanes, page.width):
        page.write(MARGIN_PX, below + NOTE_PX / 2, said)
        below += NOTE_PX
    _write_table(page, scene, below)
    timeline.draw_timeline(axes, page.theme, scene, width)


def sentence(scene: "Scene") -> str:
    """Return how many there are, which one is waited for most, and how exact that is."""
    table = scene.analysis.table
    if not table:
        return no_collectives(scene)
    each_step = count(sum(row.count for row in table))
    text = "1 collective per step" if each_step == "1" else f"{each_step} collectives per step"
    text += f" of {len(table):,} kinds" if len(table) > 1 else ""
    longest = max(table, key=lambda row: row.count * (row.waiting_ms or row.transfer_ms or 0.0))
    text += f"; most waiting: {longest.kind}"
    text += f" of {name_bytes(longest.bytes)}" if longest.bytes else ""
    if longest.waiting_ms is not None:
        text += f", {figure(longest.waiting_ms)} ms per call"
    if longest.last is not None:
        text += f"; rank {longest.last[0]} is usually last to arrive"
    text += "."
    if scene.analysis.clock_error_ms:
        text += (
            f" Clocks of two ranks differ by at most {figure(scene.analysis.clock_error_ms)} ms."
        )
    if scene.analysis.left_out:
        untimed = counted(scene.analysis.left_out, "collective")
        was = "was" if scene.analysis.left_out == 1 else "were"
        text += " To limit overhead only some steps are timed: "
        text += f"{untimed} {was} counted but not timed."
    return text


def no_collectives(scene: "Scene") -> str:
    """Return why there are no collectives to be seen."""
    if len(scene.rows) == 1:
        return "There is only one rank, so there is no communication."
    if not scene.is_timed:
        return "Collectives were not timed: %config NBDist.tap is not 'full'."
    return "No collective has been compared yet."


def table(scene: "Scene") -> ViewTable:
    """Return a line for each sort of collective."""
    head = (
        *("no.", "kind", "group", "line", "a step", "bytes", "skew ms", "came last"),
        *("waiting ms", "queueing ms", "transferring ms", "algbw", "busbw"),
    )
    groups = group_names(scene.analysis.table)
    rows = tuple(
        (str(number), *collective_cells(row, group))
        for number, (row, group) in enumerate(
            zip(scene.analysis.table, groups, strict=True), start=1
        )
    )
    return ViewTable("Collectives per step, means over the last 50", head, rows)


def group_names(table: Sequence[CollectiveRow]) -> list[str]:
    """Return the group of each line: its title, and its ranks where others have that title."""
    ranks: dict[str, set[tuple[int, ...]]] = {}
    for row in table:
        ranks.setdefault(row.title, set()).add(row.ranks)
    return [_group_name(row, is_one=len(ranks[row.title]) == 1) for row in table]


def _group_name(row: CollectiveRow, *, is_one: bool) -> str:
    who = name_ranks(row.ranks) if row.ranks else NONE
    if not row.title:
        return who
    return row.title if is_one else f"{row.title}, {who}"


def collective_cells(row: CollectiveRow, group: str) -> tuple[str, ...]:
    """Return one line of the table of collectives, without its number."""
    last = NONE if row.last is None else f"rank {row.last[0]}, {100 * row.last[1]:.0f} %"
    return (
        row.kind,
        group,
        row.line or NONE,
        count(row.count),
        f"{name_bytes(row.bytes)} {row.dtype}".rstrip(),
        or_dash(row.skew_ms, milliseconds),
        last,
        *(or_dash(ms, milliseconds) for ms in (row.waiting_ms, row.queue_ms, row.transfer_ms)),
        *(or_dash(speed, name_rate) for speed in (row.algbw, row.busbw)),
    )


def _notes(scene: "Scene", lanes: int, width: int) -> list[str]:
    line = scene.analysis.line
    assert line is not None  # there are lanes
    parts = []
    if lanes < len(line.lanes):
        who = "those that came last or waited most"
        parts.append(f"{lanes} of {len(line.lanes)} ranks: {who}.")
    if scene.analysis.clock_error_ms:
        parts.append(f"Clocks differ by at most {scene.analysis.clock_error_ms:.2g} ms.")
    parts.append("Numbers in the bars are those of the table.")
    return wrapped(" ".join(parts), width)


def _write_table(page: "Page", scene: "Scene", top: float) -> None:
    table = scene.analysis.table
    if not table:
        return
    named = list(zip(table, group_names(table), strict=True))[:MOST_ROWS]
    shown = IN_A_NARROW_ONE if is_narrow(page.width) else tuple(range(len(HEADS)))
    heads = [HEADS[at] for at in shown]
    cells = [collective_cells(row, group) for row, group in named]
    for longest in LONGEST:
        rows = [tuple(_short(row[at], longest) for at in shown) for row in cells]
        lefts, gap = _columns([heads, *rows], page.width)
        if gap >= COLUMN_PX:
            break
    for left, head in zip(lefts, heads, strict=True):
        page.write(left, top + HEADS_PX / 2, head)
    middle = top + HEADS_PX + ROW_PX / 2
    for number, row in enumerate(rows, start=1):
        page.swatch(MARGIN_PX, middle, palette.row_color(number - 1))
        page.write(MARGIN_PX + 14, middle, str(number))
        for left, cell in zip(lefts, row, strict=True):
            page.write(left, middle, cell, size=TEXT_PT)
        middle += ROW_PX
    more = len(scene.analysis.table) - len(rows)
    if more > 0:
        page.write(MARGIN_PX, middle, f"and {more} more")


def _columns(lines: Sequence[Sequence[str]], width: int) -> tuple[list[float], float]:
    """Return where columns begin and the gap between them: spread over the width."""
    longest = [
        max(len(part) for cell in column for part in cell.split("\n"))
        for column in zip(*lines, strict=True)
    ]
    first = MARGIN_PX + 34
    free = width - first - MARGIN_PX - sum(longest) * LETTER_PX
    gap = min(3 * COLUMN_PX, free / (len(longest) - 1))
    lefts, at = [], float(first)
    for letters in longest:
        lefts.append(at)
        at += letters * LETTER_PX + gap
    return lefts, gap


def _short(cell: str, longest: int) -> str:
    return cell if len(cell) <= longest else cell[: longest - 1] + "…"


def _legend_px(width: int) -> int:
    return LEGEND_PX + LINE_PX * (legend_rows(SHADES, width) - 1)


def _lane_px(lanes: int) -> int:
    return FEW_LANES_PX if lanes <= 4 else LANE_PX
