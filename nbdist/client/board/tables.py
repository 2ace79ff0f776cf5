"""The tables of the board: one value for each view, as real HTML and as aligned text.

The same cells in both: what a screen reader walks through, a terminal prints.
"""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.client.board.text import STYLE, count, figure, milliseconds, rate, size, slower
from nbdist.client.metrics.analysis.values import CollectiveRow
from nbdist.ranks import name_ranks

if TYPE_CHECKING:  # for their types alone: the scene loads numpy
    from nbdist.client.board.scene import Row, Scene

NONE = "–"
CELL = 'style="padding: 1px 10px; text-align: {}; white-space: nowrap"'


@dataclass(frozen=True, slots=True)
class ViewTable:
    """Rows of words; the first cell of a row is its name. `caption` says what it is a table of."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def to_the_right(self) -> tuple[bool, ...]:
        """Return which columns hold numbers: they end on one line."""
        return tuple(
            all(cell == NONE or cell[:1].isdigit() for cell in column)
            for column in zip(*self.rows, strict=True)
        ) or tuple(False for _ in self.head)


def to_html(table: ViewTable) -> str:
    """Return `table` with headers that screen readers tell with each cell; scrolls when long."""
    sides = ["right" if right else "left" for right in table.to_the_right]
    head = "".join(
        f'<th scope="col" {CELL.format(side)}>{html.escape(cell)}</th>'
        for cell, side in zip(table.head, sides, strict=True)
    )
    body = "".join(f"<tr>{_html_row(row, sides)}</tr>" for row in table.rows)
    return (
        f'<div style="{STYLE}; max-height: 17em; overflow: auto" tabindex="0">'
        f'<table style="margin: 0"><caption style="text-align: left; caption-side: top">'
        f"{html.escape(table.caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def to_text(table: ViewTable) -> str:
    """Return `table` as aligned columns."""
    lines = [table.head, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = table.to_the_right

    def line(cells: Sequence[str]) -> str:
        placed = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, sides, strict=True)
        )
        return "  ".join(placed).rstrip()

    return "\n".join([table.caption, *map(line, lines)])


def table(name: str, scene: "Scene") -> ViewTable:
    """Return the table of the view called `name`, one of `board.VIEWS`."""
    return _TABLES[name](scene)


def _overview(scene: "Scene") -> ViewTable:
    own = sorted({key for row in scene.rows for key in row.own})[:4]
    slow = "◀ they wait for each other" if scene.slow >= set(scene.ranks) else "◀ the others wait"
    untold = NONE if scene.is_timed else "not measured"
    head = ("rank", "device", "step", "loss", "steps/s", "step ms", "comm %", "data %", *own, "")

    def cells(row: "Row") -> tuple[str, ...]:
        return (
            str(row.rank),
            row.device,
            f"{row.step:,}",
            *map(_figure, (row.loss, row.steps_per_s, row.step_ms)),
            untold if row.comm_pct is None else _whole(row.comm_pct),
            _whole(row.data_pct),
            *(_figure(row.own.get(key)) for key in own),
            # Last, so that the columns stay where they are when it comes and goes.
            slow if row.rank in scene.slow else "",
        )

    return ViewTable("Ranks, over their last steps", head, tuple(map(cells, scene.rows)))


def _loss(scene: "Scene") -> ViewTable:
    rows = []
    for line in next((panel.lines for panel in scene.panels if panel.key == "loss"), ()):
        known = [value for value in line.y.tolist() if math.isfinite(value)]
        recent = known[-50:]
        rows.append(
            (
                str(line.rank),
                f"{int(line.x[-1]):,}",
                _figure(float(line.y[-1])),
                _figure(sum(recent) / len(recent) if recent else None),
                _figure(min(known, default=None)),
                f"{len(line.y) - len(known):,}",
            )
        )
    head = ("rank", "step", "loss", "mean of last 50", "lowest", "not finite")
    return ViewTable("Loss by rank", head, tuple(rows))


def _step(scene: "Scene") -> ViewTable:
    stack = scene.stack
    if stack is None:
        return ViewTable("Milliseconds of a step by rank", ("rank", "step"), ())
    rows = []
    for place, rank in enumerate(stack.ranks):
        waits = stack.waits_for.get(rank)
        rows.append(
            (
                str(rank),
                _ms(float(stack.whole_ms[place])),
                *(_ms(float(part[place])) for part in stack.parts.values()),
                NONE if waits is None else f"rank {waits[0]}, {figure(waits[1])} ms",
            )
        )
    head = ("rank", "step", *stack.parts, "waits for")
    return ViewTable("Milliseconds of a step by rank, mean of the last 50", head, tuple(rows))


def _collectives(scene: "Scene") -> ViewTable:
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
    return ViewTable("Collectives of a step, means over the last 50", head, rows)


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
        f"{size(row.bytes)} {row.dtype}".rstrip(),
        _ms(row.skew_ms),
        last,
        *map(_ms, (row.waiting_ms, row.queue_ms, row.transfer_ms)),
        *(NONE if speed is None else rate(speed) for speed in (row.algbw, row.busbw)),
    )


def _ranks(scene: "Scene") -> ViewTable:
    head = ["rank", "device", "state", "step", "steps/s", "samples/s", "tokens/s", "memory"]
    has_cuda = any(row.cuda_bytes is not None for row in scene.rows)
    if has_cuda:
        head += ["device memory", "its peak"]
    rows = []
    for row in scene.rows:
        cells = [str(row.rank), row.device, scene.state(row), f"{row.step:,}"]
        cells += map(_figure, (row.steps_per_s, row.samples_per_s, row.tokens_per_s))
        cells.append(_size(row.memory_bytes))
        if has_cuda:
            cells += map(_size, (row.cuda_bytes, row.cuda_peak_bytes))
        rows.append(tuple(cells))
    caption = "Ranks now" if scene.outcome is None else "Ranks at the end of the cell"
    return ViewTable(caption, tuple(head), tuple(rows))


def _verdicts(scene: "Scene") -> ViewTable:
    head = ("rank", "slower by", "cause", "since step", "verdict")
    rows = tuple(
        (str(v.rank), slower(v.share), v.cause, f"{v.since_step:,}", v.sentence)
        for v in scene.analysis.verdicts
    )
    return ViewTable("Ranks that make the others slow", head, rows)


_TABLES: dict[str, "Callable[[Scene], ViewTable]"] = {
    "overview": _overview,
    "loss": _loss,
    "step": _step,
    "collectives": _collectives,
    "ranks": _ranks,
    "verdicts": _verdicts,
}


def _html_row(row: Sequence[str], sides: Sequence[str]) -> str:
    cells = []
    for place, (cell, side) in enumerate(zip(row, sides, strict=True)):
        tag, scope = ("th", ' scope="row"') if place == 0 else ("td", "")
        cells.append(f"<{tag}{scope} {CELL.format(side)}>{html.escape(cell)}</{tag}>")
    return "".join(cells)


def _figure(value: float | None) -> str:
    return NONE if value is None else figure(value)


def _ms(value: float | None) -> str:
    return NONE if value is None else milliseconds(value)


def _whole(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f}"


def _size(value: float | None) -> str:
    return NONE if value is None else size(value)
