"""What was changed by hand while a cell trained, as its ranks report it: a fact of each. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbdist.shared import plain
from nbdist.shared.wire import CHANGES


@dataclass(frozen=True, slots=True)
class Change:
    """A value that was set on all ranks after `step` of the cell.

    `old` and `new` are as `repr` writes them, cut where they are long; the old lr is that of each
    group, with commas, where they differed. `encoded` is the new one, as `shared/plain` encodes it.
    """

    step: int
    name: str
    old: str
    new: str
    encoded: Any

    def __str__(self) -> str:
        return f"{self.name} {self.old} -> {self.new} after step {self.step}"

    @property
    def value(self) -> Any:
        """What it was set to."""
        return plain.decode(self.encoded)

    @property
    def as_comment(self) -> str:
        """What stands above an exported cell."""
        return f"{self.name} was set to {self.new} after step {self.step} by hand"


def changes_of(facts: Mapping[int, Mapping[str, str]]) -> tuple[Change, ...]:
    """Return the changes that ranks have reported, in order; the rank that reports most counts.

    One that was replaced, or has not sent its newest facts yet, knows fewer of them.
    """
    told = [json.loads(of_rank.get(CHANGES, "[]")) for of_rank in dict(facts).values()]
    return tuple(Change(*one) for one in max(told, key=len, default=[]))
