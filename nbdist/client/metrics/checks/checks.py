"""Hear one cell's records, and say what goes wrong in its training: each thing once.

Threads: `receive` runs on ipyparallel's IO thread, `lines` on the main one.
"""

from collections.abc import MutableSequence

from nbdist.client.metrics.checks.batch_growth import BatchGrowth, Trained
from nbdist.client.metrics.checks.drift import Drift, Ends
from nbdist.client.metrics.checks.loader_split import LoaderSplit
from nbdist.client.metrics.checks.not_finite import NotFinite
from nbdist.client.metrics.checks.starving import Starving
from nbdist.client.metrics.checks.uses import Uses
from nbdist.client.metrics.telemetry import CellInfo
from nbdist.shared.wire import Record


class CellChecks:
    """What one cell's ranks have reported, and what follows from it."""

    def __init__(
        self, info: CellInfo, before: MutableSequence[Trained], ends: Ends | None = None
    ) -> None:
        """Begin with nothing known.

        Args:
            info: The cell.
            before: What earlier cells trained with; this one's is added once it is known.
            ends: How earlier cells left models that differ; of this one likewise.
        """
        self._growth = BatchGrowth(info, before)
        self._drift = Drift(info.ranks, ends)
        self._not_finite = NotFinite(info.ranks)
        self._split = LoaderSplit(info.ranks)
        self._starving = Starving(info.ranks)
        self._uses = Uses(info.ranks)
        self._found: dict[str, str] = {}  # by rule; the first time counts
        self._said = 0

    @property
    def found(self) -> tuple[str, ...]:
        """All that was found so far, the oldest first."""
        return tuple(self._found.values())

    def receive(self, records: list[Record]) -> None:
        """Take in what ranks tell."""
        self._growth.receive(records)
        for record in records:  # nearly all of them are steps in which nothing is found
            if record.kind == "alike":
                self._note("drift", self._drift.take(record.rank, record.step, record.values))
                continue
            if record.kind == "step" and (sentence := self._not_finite.take(record)):
                self._note("loss", sentence)
            if sentence := self._split.take(record):
                self._note("split", sentence)
            if sentence := self._starving.take(record):
                self._note("loader", sentence)
            if found := self._uses.take(record):
                for rule, sentence in found.items():
                    self._note(rule, sentence)

    def lines(self, *, is_last: bool = False) -> list[str]:
        """Return what was found since the last call; with `is_last`, no more records will come."""
        self._note("growth", self._growth.line(is_last=is_last))
        if is_last:
            self._note("loss", self._not_finite.line())
            self._note("loader", self._starving.line(is_last=True))
        new = list(self.found)[self._said :]
        self._said += len(new)
        return new

    def _note(self, rule: str, sentence: str) -> None:
        if sentence:
            self._found.setdefault(rule, sentence)
