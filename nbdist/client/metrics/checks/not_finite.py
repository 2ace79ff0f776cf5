"""Notice a loss that is no number any more.

Of a single step that says little: it is told once the next one's is none either, or the cell ends.
All ranks are heard of the step where it began, so that one sentence names all that it befell.
"""

import math
from collections.abc import Sequence

from nbdist.shared.text import name_ranks
from nbdist.shared.wire import Record


class NotFinite:
    """One cell's losses, as backward saw them."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """Begin with nothing known of these ranks."""
        self._ranks = frozenset(ranks)
        self._newest: dict[int, int] = {}  # each rank's newest step
        self._since: dict[int, tuple[int, float]] = {}  # since which step it is none, and what

    def take(self, record: Record) -> str:
        """Take in a step; return a sentence where a loss stays no number, else ""."""
        rank, loss = record.rank, record.values.get("loss")
        if record.step <= self._newest.get(rank, 0):
            return ""  # what fills a gap is older
        self._newest[rank] = record.step
        if loss is not None:
            if math.isfinite(loss):
                self._since.pop(rank, None)
            else:
                self._since.setdefault(rank, (record.step, loss))
        if not self._since:
            return ""
        first = min(step for step, _ in self._since.values())
        is_heard = self._newest.keys() >= self._ranks and min(self._newest.values()) > first
        return self.line() if is_heard else ""

    def line(self) -> str:
        """Return a sentence where the newest loss is no number: no more records will come."""
        if not self._since:
            return ""
        first, value = min(self._since.values(), key=lambda since: since[0])
        word = "NaN" if math.isnan(value) else "infinite"
        begun = [rank for rank, (step, _) in self._since.items() if step == first]
        on = "all ranks" if len(begun) == len(self._ranks) > 1 else name_ranks(sorted(begun))
        said = f"The loss is {word} on {on} since step {first}"
        # It has come from those where it began, with the gradients.
        later = {rank: step for rank, (step, _) in self._since.items() if step > first}
        if later:
            said += f", and on {name_ranks(sorted(later))} since step {min(later.values())}"
        return f"{said}."
