"""Watch training with no change to the loop, and let it say more: what the rest of a rank calls.

The hooks stand in `hooks.py`, what becomes of them in `cell.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from nbdist import side
from nbdist.engine.component import Component, EndedCell
from nbdist.engine.kernel.records import Recorder
from nbdist.engine.training.hooks import Hooks
from nbdist.errors import UsageError
from nbdist.wire import CellStart

_hooks: Hooks | None = None
_tell_log: Callable[[int, Mapping[str, float]], None] | None = None


def install(recorder: Recorder) -> None:
    """Put the hooks in place; their records go to `recorder`."""
    global _hooks
    if _hooks is None:
        _hooks = Hooks(recorder)
    _hooks.recorder = recorder
    _hooks.set_enabled(True)


def set_enabled(is_enabled: bool, *, grad_norm: bool = False) -> None:
    """Switch the hooks on or off; off, nothing of them is left in torch.

    With `grad_norm`, steps of the cells that begin from here on tell their share of the norm.
    """
    if _hooks is not None:
        _hooks.grad_norm = grad_norm
        _hooks.set_enabled(is_enabled)


def at_step_end(name: str, callback: Callable[[int], None] | None) -> None:
    """Call `callback` on the main thread with the number of each step that ends; None: no more.

    One that raises is logged, and not called again in this cell, whose end says so.

    Args:
        name: Whose it is; each has one.
        callback: Gets the step's number.
    """
    if _hooks is not None:
        _hooks.at_step_end(name, callback)


def at_new_optimizer(name: str, callback: Callable[[torch.optim.Optimizer], None]) -> None:
    """Call `callback` on the main thread before an optimizer's first step in a cell.

    One that raises is logged, and not called again in this cell; each name has one.
    """
    if _hooks is not None:
        _hooks.on_new_optimizer[name] = callback


class Training(Component):
    """The steps of the cell that runs, or ran last."""

    def cell_began(self, start: CellStart) -> None:
        """Count steps from 1 again."""
        begin_cell()

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Complete the records of the cell's steps; return what is to be said of them."""
        end_cell()
        return () if _hooks is None else _hooks.notices()


def begin_cell() -> None:
    """A cell begins: steps count from 1 again."""
    if _hooks is not None:
        _hooks.begin_cell()


def end_cell() -> int:
    """A cell has ended, however: complete its records, return the steps it made."""
    return 0 if _hooks is None else _hooks.end_cell()


def note_loss(loss: torch.Tensor) -> None:
    """Take in the loss of a backward that is made in halves, of which no hook sees the root."""
    if _hooks is not None:
        _hooks.note_loss(loss)


def current_step() -> int:
    """Return the steps of the current or last cell. Any thread."""
    return 0 if _hooks is None else _hooks.cell.step


def current_pass() -> tuple[Any, int]:
    """Return the DataLoader's iterator that the cell asked last, or None, and its first step."""
    return (None, 0) if _hooks is None else _hooks.cell.current_pass


def begun_pass() -> Any:
    """Return the iterator of the newest batch that may be trained on, if the cell has begun it."""
    return None if _hooks is None else _hooks.cell.begun_pass


def is_loading() -> bool:
    """Return whether the main thread waits for a DataLoader's batch. Any thread."""
    return _hooks is not None and _hooks.is_loading


def pace() -> float:
    """Return the samples a second that this rank has worked through by itself; 0: not known."""
    return 0.0 if _hooks is None else _hooks.pace()


def rest_s() -> float:
    """Return the seconds of this rank's recent steps without waiting for data; 0: not known."""
    return 0.0 if _hooks is None else _hooks.rest_s()


@contextmanager
def unseen() -> Iterator[None]:
    """Watch nothing: what is computed in it is no training. Main thread.

    The step that is being made has no times of its own, for their beginning is not seen any more.
    """
    if _hooks is None:
        yield
        return
    with _hooks.unseen():
        yield


def log(*unnamed: object, **values: object) -> None:
    """Record numbers of your own at the current step, beside the automatic ones.

    Args:
        unnamed: Nothing; a number without a name is refused.
        values: Numbers: Python's, numpy's, or tensors of one element.

    Raises:
        UsageError: A value is no number, or this is the notebook; nothing was recorded.

    In a script, after `nbdist.init()`, one rank prints them: 0, or the lowest that logs the name.
    """
    side.require_rank("nbdist.log")
    if unnamed or not values:
        raise UsageError("nbdist.log takes numbers by name, such as nbdist.log(accuracy=0.93).")
    numbers = {name: _number(name, value) for name, value in values.items()}
    if _hooks is not None:
        _hooks.recorder.add("log", _hooks.cell.step, numbers)
    if _tell_log is not None:
        _tell_log(current_step(), numbers)


def tell_logs(tell: Callable[[int, Mapping[str, float]], None]) -> None:
    """Call `tell` with the step and the numbers of each `log`, where no notebook listens.

    The step is 0 where nothing counts them.
    """
    global _tell_log
    _tell_log = tell


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return float(value.detach().item())
        # numpy's numbers and arrays of one element, without importing numpy here
        if isinstance(value, int | float) or getattr(value, "size", None) == 1:
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    shape = getattr(value, "shape", None)
    what = type(value).__name__ if shape is None else f"{type(value).__name__} of {tuple(shape)}"
    raise UsageError(f"nbdist.log takes numbers, and {name} is a {what}.")
