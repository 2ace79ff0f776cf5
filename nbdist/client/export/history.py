"""What the kernel has run, in order, as the cells that a script is made of.

Each cell stands once: where it succeeded first, as it succeeded last. So a definition that was
corrected after it was used stays above its use. Which runs are of one cell the front end says, by
an id; where it sends none (nbclient, papermill, IPython in a terminal) each run is a cell.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from nbdist.client.export.cells import RETRY, NotebookCell
from nbdist.client.export.sent import Sent, sent
from nbdist.client.metrics.changes import Change


@dataclass(slots=True)
class _Running:
    """What the cell that runs has done so far."""

    sent: list[Sent] = field(default_factory=list)
    ran_code: bool = False
    losses: Mapping[int, float] = field(default_factory=dict)
    changes: tuple[str, ...] = ()


class History:
    """The cells that a kernel has run. Main thread.

    Attributes:
        is_watched: Whether it is told of what the kernel runs; it is not where a program has the
            session.
    """

    def __init__(self) -> None:
        """Begin with nothing run."""
        self.is_watched = False
        self._cells: dict[str, NotebookCell] = {}  # by the cell's id, or one of the run's own
        self._running = _Running()
        self._failed = ""  # the id of the newest cell of ranks that failed, till it succeeds
        self._count = 0

    def note_push(self, values: Mapping[str, object], ranks: str = "all") -> None:
        """Note what the cell that runs has sent to ranks."""
        self._running.sent += (sent(name, value, ranks) for name, value in values.items())

    def note_code(self) -> None:
        """Note that the cell that runs has let ranks run code."""
        self._running.ran_code = True

    def note_trained(self, losses: Mapping[int, float], changes: Sequence[Change] = ()) -> None:
        """Note a training in the cell that runs: first losses by rank, what was changed by hand."""
        self._running.losses = self._running.losses or losses
        self._running.changes += tuple(one.as_comment for one in changes)

    def note_run(
        self, number: int, source: str, cell_id: str | None, *, has_failed: bool, trouble: str = ""
    ) -> None:
        """Note a cell that has ended; without an id it is none of those before.

        Args:
            number: The prompt's.
            source: As it stands in the notebook.
            cell_id: The front end's.
            has_failed: It ended with an error.
            trouble: Why no script can have it, where it is not that.
        """
        self._count += 1
        running, self._running = self._running, _Running()
        if RETRY.search(source):
            self._retry(number, running, has_failed)
            return
        found = NotebookCell(
            number,
            source,
            "failed" if has_failed else trouble,
            tuple(running.sent),
            losses=running.losses,
            changes=running.changes,
        )
        found = replace(
            found,
            ran_code=running.ran_code and not found.is_of_ranks,
            has_lost_steps=has_failed and bool(running.losses),
        )
        key = cell_id or self._same_that_failed(source) or f"run {self._count}"
        if found.is_of_ranks:
            self._failed = key if has_failed else ("" if self._failed == key else self._failed)
        self._put(key, found)

    def _put(self, key: str, cell: NotebookCell) -> None:
        before = self._cells.get(key)
        if before is not None:
            cell = replace(cell, has_lost_steps=before.has_lost_steps or cell.has_lost_steps)
        if before is None:
            self._cells[key] = cell
        elif before.trouble == "failed" and not cell.trouble:
            del self._cells[key]  # it stands where it succeeds first
            self._cells[key] = cell
        elif cell.trouble != "failed":
            self._cells[key] = replace(cell, runs=before.runs + 1)
        elif cell.has_lost_steps:
            self._cells[key] = replace(before, has_lost_steps=True)

    def _retry(self, number: int, running: _Running, has_failed: bool) -> None:
        """Take the cell that `%dist retry` has run again for one that has succeeded."""
        if self._failed in self._cells and not has_failed:
            cell = self._cells[self._failed]
            # A loop that continues begins where the attempt began that failed.
            again = replace(
                cell,
                number=number,
                trouble="",
                losses=cell.losses or running.losses,
                changes=cell.changes + running.changes,
            )
            self._put(self._failed, again)
            self._failed = ""

    def _same_that_failed(self, source: str) -> str:
        """Return the key of a run without an id that failed with this source; "" without one."""
        for key, cell in reversed(self._cells.items()):
            if key.startswith("run ") and cell.trouble == "failed" and cell.source == source:
                return key
        return ""

    def cells(self, without: str = "") -> list[NotebookCell]:
        """Return the cells in the order of their first successes, each as it succeeded last.

        Args:
            without: The front end's id of a cell to leave out.
        """
        return [cell for key, cell in self._cells.items() if not without or key != without]
