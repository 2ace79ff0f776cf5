"""One row a figure: what was measured, beside what, how sure it is, and whether that will do.

Pure. A figure may have been measured on several machines: then the table shows from what to what.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nbdist.shared.text import MICROSECONDS, figure

HEAD = ("what", "measured", "beside", "ratio", "noise", "goal", "")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one run.

    `measured` and `reference` are in `unit`, and were taken in turns. `noise` is the difference of
    the reference to itself in the same turns, as a share of it. `goal` bounds `goal_on` from above.
    """

    what: str
    measured: float
    unit: str
    reference: float | None = None
    beside: str = ""  # what the reference is, or a word on what was measured
    noise: float | None = None
    goal: float | None = None
    goal_on: Literal["ratio", "measured"] = "ratio"
    is_share: bool = False  # the ratio is read in per cent: what was measured is an addition

    def __post_init__(self) -> None:
        if self.goal is not None and self.goal_on == "ratio" and self.reference is None:
            raise ValueError(f"{self.what}: a goal for a ratio, and no reference.")

    @property
    def ratio(self) -> float | None:
        """What was measured, in references."""
        return None if self.reference is None else self.measured / self.reference

    @property
    def reached(self) -> bool:
        """Whether the figure is at or below its goal; without a goal it is."""
        judged = self.ratio if self.goal_on == "ratio" else self.measured
        return self.goal is None or judged is None or judged <= self.goal


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Return by what share the medians of one thing, timed twice in turns, differ: the noise."""
    return abs(statistics.median(one) / statistics.median(other) - 1)


def render(found: Sequence[Sequence[Row]]) -> str:
    """Return a Markdown table, and a line that names what falls short.

    Args:
        found: For each figure its row on each machine, of the newest run last.
    """
    table = [HEAD, *map(_cells, found)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "| " + " | ".join(f"{w:<{n}}" for w, n in zip(words, widths, strict=True)) + " |"
        for words in table
    ]
    lines.insert(1, "| " + " | ".join("-" * n for n in widths) + " |")
    short = [rows[-1].what for rows in found if _is_short(rows)]
    verdict = f"Falls short: {'; '.join(short)}." if short else "Every goal is reached."
    return "\n".join([*lines, "", verdict])


def _cells(rows: Sequence[Row]) -> tuple[str, ...]:
    last = rows[-1]
    references = [row.reference for row in rows if row.reference is not None]
    noises = [row.noise for row in rows if row.noise is not None]
    beside = (_range(references, last.unit), last.beside) if references else (last.beside,)
    return (
        last.what,
        _range([row.measured for row in rows], last.unit),
        " ".join(filter(None, beside)),
        _ratios(rows),
        f"{100 * max(noises):.1f} %" if noises else "",
        _goal(last),
        "short" if _is_short(rows) else "",
    )


def _ratios(rows: Sequence[Row]) -> str:
    ratios = [row.ratio for row in rows if row.ratio is not None]
    if rows[-1].is_share:
        return _range([100 * ratio for ratio in ratios], "%")
    return _range(ratios, "x")


def _goal(row: Row) -> str:
    if row.goal is None:
        return ""
    if row.goal_on == "measured":
        return f"{row.goal:g} {_shown(row.unit)}"
    return f"{100 * row.goal:g} %" if row.is_share else f"{row.goal:g} x"


def _is_short(rows: Sequence[Row]) -> bool:
    return not all(row.reached for row in rows)


def _shown(unit: str) -> str:
    return MICROSECONDS if unit == "us" else unit


def _range(values: Sequence[float], unit: str) -> str:
    if not values:
        return ""
    low, high = figure(min(values)), figure(max(values))
    return f"{low if low == high else f'{low} to {high}'} {_shown(unit)}"
