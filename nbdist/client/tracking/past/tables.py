"""Lay out rows of texts as a plain table, and as an HTML one. Pure."""

import html
from collections.abc import Sequence

from nbdist.shared.text import aligned, figure

_MOST_CHARACTERS = 80  # of a cell: a run's name always has room


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a plain table; the first is its header."""
    return aligned([_cut(row) for row in (header, *rows)])


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table."""
    header, rows = _cut(header), [_cut(row) for row in rows]
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cut(row: Sequence[str]) -> list[str]:
    """Return cells of one line each; what a user calls a param, or gives for one, may be a page."""
    lines = [" ".join(text.split("\n")) for text in row]
    return [t if len(t) <= _MOST_CHARACTERS else t[: _MOST_CHARACTERS - 1] + "…" for t in lines]


def used_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """Return the table without the columns that no row fills."""
    used = [i for i, _ in enumerate(header) if any(row[i] for row in rows)]
    return [header[i] for i in used], [[row[i] for i in used] for row in rows]


def number(value: float | None) -> str:
    """Return a number for people with the digits that the board gives it; empty for None."""
    return "" if value is None else figure(value)


def whole(value: float | None) -> str:
    """Return a share in percent, which is not known better; empty for None."""
    return "" if value is None else f"{value:.0f}"
