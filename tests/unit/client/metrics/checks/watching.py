"""Rules as a cell asks them, by their one interface: records in, sentences out."""

from collections.abc import Iterable, Sequence
from typing import Any

from nbdist.client.metrics.checks.cell_checks import CellChecks
from nbdist.client.metrics.checks.rule import Memory, Rule, WatchedCell
from nbdist.client.metrics.telemetry import CellInfo
from nbdist.shared.wire import Record


class Watching:
    """One rule in one cell: what it says of each record, however often."""

    def __init__(
        self,
        rule: Rule[Any],
        ranks: Iterable[int],
        *,
        session: Memory | None = None,
        kernel: Memory | None = None,
        is_of_sweep: bool = False,
    ) -> None:
        memories = session or Memory(), kernel or Memory()
        self._rule = rule
        self.watcher = rule.watcher(WatchedCell(tuple(ranks), is_of_sweep, *memories))

    def take(self, record: Record) -> str:
        return self._said(self.watcher.take(record))

    def end(self) -> str:
        return self._said(self.watcher.end())

    def _said(self, value: Any) -> str:
        return "" if value is None else self._rule.decide(value)


def cell_of(ranks: Sequence[int], **more: Any) -> CellInfo:
    """Return a cell on these ranks."""
    return CellInfo(7, "", tuple(ranks), len(ranks), "gloo", ("cpu",) * len(ranks), **more)


def checks_of(ranks: int, **more: Any) -> CellChecks:
    """Return the checks of a cell on so many ranks."""
    return CellChecks(cell_of(range(ranks)), **more)
