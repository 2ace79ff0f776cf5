"""A host is told to leave: all ranks save after the same step, and the notebook ends the cell.

1. `hold`: from its next boundary on, a rank stands still. It answers how many it has passed.
2. `go_on_to` the highest of these and one: no rank is beyond it, and each can get there, since who
   stands still before it goes on. There all save together.
3. `outcome`, until it is written everywhere. The notebook then interrupts the cell.

Threads: `at_boundary`, `saved` and `cell_began` on the main one, the rest on the control thread.
"""

import threading
import time
from typing import Any, Final

from nbdist.engine.checkpoint.saving import Saving

_MOST_S: Final = 10.0  # that a rank stands still for a notebook that does not answer


class Leaving:
    """The save that a rank makes before its host leaves, in the cell that runs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_held = self._saves = False
        self._passed = 0  # boundaries, in this cell
        self._target: int | None = None
        self._saving: Saving | None = None
        self._error = ""

    def cell_began(self, *, saves: bool) -> None:
        """Begin a cell, which saves by itself or does not."""
        with self._changed:
            self._is_held, self._saves, self._passed, self._target = False, saves, 0, None
            self._saving, self._error = None, ""

    def hold(self) -> dict[str, Any]:
        """Stand still at the next boundary; return `passed` and whether the cell `saves`."""
        with self._changed:
            self._is_held = self._saves
            return {"passed": self._passed, "saves": self._saves}

    def go_on_to(self, boundary: int | None) -> None:
        """Go on to this boundary and save there; None: to the end, without saving."""
        with self._changed:
            self._target = boundary
            self._is_held = boundary is not None
            self._changed.notify_all()

    def outcome(self) -> dict[str, Any]:
        """Return whether it `is_over`, and `step` and `folder` of what is saved, or the `error`."""
        saving = self._saving
        if self._error:
            return {"is_over": True, "error": self._error}
        if saving is None or not saving.is_done:
            return {"is_over": False}
        error = "" if saving.error is None else saving.error.what
        return {"is_over": True, "error": error, "step": saving.step, "folder": str(saving.folder)}

    def at_boundary(self) -> bool:
        """Count a boundary, and stand still where that is asked; return whether to save now."""
        with self._changed:
            self._passed += 1
            deadline = time.monotonic() + _MOST_S
            while self._is_held and self._target is None:
                if time.monotonic() > deadline:
                    self._is_held = False
                self._changed.wait(0.1)  # signals are heard in between
            return self._is_held and self._target == self._passed

    def saved(self, saving: Saving | None, error: str = "") -> None:
        """Note what has been begun, or why it was not."""
        self._saving, self._error = saving, error


here = Leaving()
