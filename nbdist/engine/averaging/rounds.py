"""Decide after which steps ranks average, and over whom. Pure."""

from dataclasses import dataclass
from typing import Literal

from nbdist.shared.errors import LayoutError

Due = Literal["nothing", "inside", "all"]


@dataclass(frozen=True, slots=True)
class Rounds:
    """The steps after which ranks average.

    Attributes:
        every: Steps from one averaging to the next.
        warmup_steps: The first steps, each of which is followed by an averaging over all.
        between: Steps from one averaging over all to the next; those in between are inside a group
            of near ranks. None: all of them are over all.
    """

    every: int
    warmup_steps: int = 0
    between: int | None = None

    def __post_init__(self) -> None:
        for name in ("every", "between"):
            value = getattr(self, name)
            if not ((value is None and name == "between") or _is_count(value, 1)):
                raise LayoutError(f"{name} is a number of steps, 1 or more, not {value!r}.")
        if not _is_count(self.warmup_steps, 0):
            raise LayoutError(f"warmup_steps is 0 or more, not {self.warmup_steps!r}.")
        if self.between is not None and self.between % self.every:
            fits = max(1, round(self.between / self.every)) * self.every
            raise LayoutError(
                f"between={self.between} is not a multiple of every={self.every}.",
                why="an averaging over all takes the place of one inside the groups",
                do=f"use between={fits}",
            )

    @property
    def length(self) -> int:
        """Steps from one averaging over all ranks to the next, after the warm-up."""
        return self.between or self.every

    def due(self, step: int) -> Due:
        """Return the averaging after the step of this number, from 1."""
        since = step - self.warmup_steps
        if since <= 0 or since % self.length == 0:
            return "all"
        return "inside" if since % self.every == 0 else "nothing"

    def next_for_all(self, step: int, ahead: int) -> int:
        """Return after how many steps from `step`, at least `ahead`, all ranks average."""
        first = step + max(ahead, 1)
        if first <= self.warmup_steps:
            return first - step
        into = (first - self.warmup_steps) % self.length
        return first - step + (self.length - into if into else 0)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
