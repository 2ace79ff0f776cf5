"""The one interface of the rules on silent mistakes: what each reads, how it decides, what it says.

A `Watcher` puts one cell's records together into plain values; rules that read the same share it.
A `Rule` decides on such a value: a sentence with cause, place and remedy, or "". It brings its page
in docs/checks.md, a planted mistake with its sound twin, and an example that real ranks run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from nbdist.shared.wire import Record

Kept = TypeVar("Kept")
Value = TypeVar("Value")


class Memory:
    """What watchers keep from cell to cell: one object of each class."""

    def __init__(self) -> None:
        self._kept: dict[type[Any], Any] = {}

    def of(self, kind: type[Kept]) -> Kept:
        """Return the object of a class, made where there is none yet."""
        kept: Kept = self._kept.setdefault(kind, kind())
        return kept


@dataclass(frozen=True, slots=True)
class WatchedCell:
    """What watchers know of a cell before its first record.

    Attributes:
        ranks: Those that run it, ascending.
        is_of_sweep: Whether its parameters are varied on purpose.
        of_session: What earlier cells of the session have left.
        of_kernel: The same of all sessions of the kernel.
    """

    ranks: tuple[int, ...]
    is_of_sweep: bool = False
    of_session: Memory = field(default_factory=Memory)
    of_kernel: Memory = field(default_factory=Memory)


class Watcher(Generic[Value]):
    """Puts one cell's records together; made when the cell begins.

    Threads: `take` runs on ipyparallel's IO thread, `end` on the main one, when no more will come.
    """

    kinds: ClassVar[frozenset[str]]
    """The records that it takes; see `wire.Record`."""

    def __init__(self, cell: WatchedCell) -> None:
        """Begin with nothing known."""

    def take(self, record: Record) -> Value | None:
        """Take in a record; return a value where there is something new to decide on."""
        raise NotImplementedError

    def end(self) -> Value | None:
        """Return what is left to decide on, now that no more records will come."""
        return None


@dataclass(frozen=True, slots=True)
class Rule(Generic[Value]):
    """One rule.

    Attributes:
        name: By which people turn it off: kebab case, stable.
        what: What it notices, in a clause.
        watcher: Makes what it decides on.
        decide: Returns a sentence where that is a mistake, else "". Pure.
        remedy: What to do, in a sentence for its page.
        planted: Records of two ranks that have made the mistake.
        sound: Records of two that have not: else the same.
        example: A cell that makes the mistake on two ranks.
        mended: The same cell without it.
        sources: Where people met it: public reports, or a documented trap.
    """

    name: str
    what: str
    watcher: type[Watcher[Value]]
    decide: Callable[[Value], str]
    remedy: str
    planted: Sequence[Record]
    sound: Sequence[Record]
    example: str
    mended: str
    sources: tuple[str, ...]
