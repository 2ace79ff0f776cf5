"""One row a figure: what was measured, against what, and whether it reaches the goal."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of PRODUCT.md. `measured` and `goal` are in `unit`; `x` means a ratio."""

    what: str
    measured: float
    goal: float
    unit: str
    note: str = ""

    @property
    def reached(self) -> bool:
        """Whether the figure is at or below its goal."""
        return self.measured <= self.goal

    def cells(self) -> tuple[str, str, str, str, str]:
        """Return the words of the row."""
        verdict = "" if self.reached else "short"
        return (
            self.what,
            f"{self.measured:.3g} {self.unit}",
            f"{self.goal:g} {self.unit}",
            verdict,
            self.note,
        )


def render(rows: Iterable[Row]) -> str:
    """Return rows as a Markdown table, and a last line that names what falls short."""
    listed = list(rows)
    head = ("what", "measured", "goal", "", "beside it")
    table = [head, *(row.cells() for row in listed)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "| " + " | ".join(f"{w:<{n}}" for w, n in zip(words, widths, strict=True)) + " |"
        for words in table
    ]
    lines.insert(1, "| " + " | ".join("-" * n for n in widths) + " |")
    short = [row.what for row in listed if not row.reached]
    verdict = f"Falls short: {'; '.join(short)}." if short else "Every goal is reached."
    return "\n".join([*lines, "", verdict])
