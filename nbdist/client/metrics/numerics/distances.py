"""The distances of two computations, place by place, in the order of computation."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from nbdist.shared.text import aligned, figure

AROUND: Final = 4  # rows of a table on each side of the place where two part


@dataclass(frozen=True, slots=True)
class Distance:
    """That of one tensor.

    Attributes:
        what: It is: "output", "gradient", "weight" and the like.
        name: Of its module, parameter or buffer; "" for a loss.
        step: From 1.
        rank: Whose.
        by: How far apart; infinite where one side has none, or one of another shape.
        limit: The largest that may be round-off.
        missing: Why there is none, in words: one side lacks it, or has another shape.
    """

    what: str
    name: str
    step: int
    rank: int
    by: float
    limit: float
    missing: str = ""

    @property
    def share(self) -> float:
        """The distance in units of the limit; infinite where it is no number."""
        if self.by == 0:
            return 0.0
        share = self.by / self.limit if self.limit else math.inf
        return math.inf if math.isnan(share) else share

    @property
    def is_beyond(self) -> bool:
        """Whether round-off does not explain it."""
        return self.share > 1

    @property
    def place(self) -> str:
        """What it is the distance of, in words."""
        return f"the {self.what} of {self.name}" if self.name else f"the {self.what}"


@dataclass(frozen=True, slots=True)
class Curve:
    """The distances of one computation from another, in order, and what to call it."""

    name: str
    distances: tuple[Distance, ...]


def first_beyond(distances: Iterable[Distance]) -> int | None:
    """Return the index of the first that round-off does not explain."""
    return next((at for at, one in enumerate(distances) if one.is_beyond), None)


def around(count: int, at: int | None) -> range:
    """Return the rows of a table of so many that are shown: those around one, or the last."""
    if at is None:
        return range(max(0, count - AROUND), count)
    return range(max(0, at - AROUND), min(count, at + AROUND + 1))


def shown(distance: Distance | None) -> str:
    """Return a distance for a table: with its limit, which it is to be held against."""
    if distance is None:
        return "-"
    if distance.by == 0:
        return "0"
    if not distance.limit and distance.what == "options":
        return "others <"
    if math.isinf(distance.by):
        return "other shape <" if " and " in distance.missing else "missing <"
    mark = " <" if distance.is_beyond else ""
    return f"{_short(distance.by)} of {_short(distance.limit)}{mark}"


def _short(value: float) -> str:
    return figure(value) if 0.001 <= abs(value) < 1000 else f"{value:.1e}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of a table of text, indented."""
    return [f"  {line}" for line in aligned([header, *rows])]
