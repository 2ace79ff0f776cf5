"""A host is told to leave: all ranks save after the same step, and the notebook ends the cell.

1. `hold`: from its next boundary on, a rank stands still. It answers how many it has passed.
2. `go_on_to` the highest of these and one: no rank is beyond it, and each can get there, since who
   stands still before it goes on. There all save together.
3. `outcome`, until it is written everywhere. The notebook then interrupts the cell.

Threads: `at_boundary`, `saved` and `begin_cell` on the main one, the rest on the control thread.
"""

import threading
import time
from typing import Any, Final

from nbdist.engine.checkpoint.saving import Saving

_MOST_S: Final = 10.0  # that a rank stands still for a notebook that does not answer

_changed = threading.Condition()
_is_held = _saves = False
_passed = 0  # boundaries, in this cell
_target: int | None = None
_saving: Saving | None = None
_error = ""


def begin_cell(*, saves: bool) -> None:
    """Begin a cell, which saves by itself or does not."""
    global _is_held, _saves, _passed, _target, _saving, _error
    with _changed:
        _is_held, _saves, _passed, _target, _saving, _error = False, saves, 0, None, None, ""


def hold() -> dict[str, Any]:
    """Stand still at the next boundary; return `passed` and whether the cell `saves`."""
    global _is_held
    with _changed:
        _is_held = _saves
        return {"passed": _passed, "saves": _saves}


def go_on_to(boundary: int | None) -> None:
    """Go on to this boundary and save there; None: to the end, without saving."""
    global _is_held, _target
    with _changed:
        _target = boundary
        _is_held = boundary is not None
        _changed.notify_all()


def outcome() -> dict[str, Any]:
    """Return whether it `is_over`, and the `step` and `folder` of what is saved, or the `error`."""
    if _error:
        return {"is_over": True, "error": _error}
    if _saving is None or not _saving.is_done:
        return {"is_over": False}
    error = _saving.error
    told = {"step": _saving.step, "folder": str(_saving.folder)}
    return {"is_over": True, "error": "" if error is None else error.what, **told}


def at_boundary() -> bool:
    """Count a boundary, and stand still where that is asked; return whether to save now."""
    global _passed, _is_held
    with _changed:
        _passed += 1
        deadline = time.monotonic() + _MOST_S
        while _is_held and _target is None:
            if time.monotonic() > deadline:
                _is_held = False
            _changed.wait(0.1)  # signals are heard in between
        return _is_held and _target == _passed


def saved(saving: Saving | None, error: str = "") -> None:
    """Note what has been begun, or why it was not."""
    global _saving, _error
    _saving, _error = saving, error
