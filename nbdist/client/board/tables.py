"""The tables of the board: one value for each view, as real HTML and as aligned text.

The same cells in both: what a screen reader walks through, a terminal prints.
"""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nbdist.client.board.text import STYLE
from nbdist.shared.text import aligned, figure

NONE = "–"
HEAD = 'style="padding: 1px 8px; text-align: {}; vertical-align: bottom; white-space: normal"'
# Words break where a window is too narrow for them, numbers with their units do not.
CELL = 'style="padding: 1px 8px; text-align: {}; white-space: {}; max-width: 24em"'


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
    """Return `table` with headers that screen readers read with each cell; scrolls when long."""
    sides = ["right" if right else "left" for right in table.to_the_right]
    head = "".join(
        f'<th scope="col" {HEAD.format(side)}>{html.escape(cell)}</th>'
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
    lines = aligned([table.head, *table.rows], table.to_the_right)
    return "\n".join([table.caption, *lines])


def or_dash(value: float | None, write: Callable[[float], str] = figure) -> str:
    """Return a number as a cell of a table, a dash where it is not known."""
    return NONE if value is None else write(value)


def _html_row(row: Sequence[str], sides: Sequence[str]) -> str:
    cells = []
    for place, (cell, side) in enumerate(zip(row, sides, strict=True)):
        tag, scope = ("th", ' scope="row"') if place == 0 else ("td", "")
        style = CELL.format(side, "nowrap" if side == "right" else "normal")
        cells.append(f"<{tag}{scope} {style}>{html.escape(cell)}</{tag}>")
    return "".join(cells)
