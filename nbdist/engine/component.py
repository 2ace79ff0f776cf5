"""The interface of a rank's parts beside the user's code: they are called around each cell.

A rank has one visible tuple of components (`engine/rank/components.py`); a script that torchrun
starts has a shorter one. As a cell begins they are called in that order, and in reverse as it ends,
as contexts within each other are. A component holds its own state and needs no process around it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from nbdist.shared.wire import CellStart


@dataclass(frozen=True, slots=True)
class EndedCell:
    """A cell that is over: its `number` in the session, its `source`, and whether it went well."""

    number: int
    source: str
    has_succeeded: bool


class Component:
    """A part called around the cells of a rank. All methods are empty by default. Main thread."""

    def cell_began(self, start: CellStart) -> None:
        """A cell is about to run."""

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """A cell is over, failed or not; return sentences for the user, each shown once."""
        return ()
