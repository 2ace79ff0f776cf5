"""Observe training without a change to the loop: the interface for the rest of a rank.

The hooks are in `hooks.py`, their records in `cell.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from nbdist.engine.component import Component, EndedCell
from nbdist.engine.kernel.records import Recorder
from nbdist.engine.training.cell import Pass
from nbdist.engine.training.hooks import Hooks
from nbdist.shared import side
from nbdist.shared.errors import UsageError
from nbdist.shared.wire import CellStart


class Training(Component):
    """The hooks that observe this rank's training, and the steps of the current or last cell."""

    def __init__(self) -> None:
        self._hooks: Hooks | None = None
        self._on_log: Callable[[int, Mapping[str, float]], None] | None = None

    def install(self, recorder: Recorder) -> None:
        """Install the hooks; their records go to `recorder`."""
        if self._hooks is None:
            self._hooks = Hooks(recorder)
        self._hooks.recorder = recorder
        self._hooks.set_enabled(True)

    def set_enabled(self, is_enabled: bool, *, grad_norm: bool = False) -> None:
        """Enable or disable the hooks; disabled ones are removed from torch.

        With `grad_norm`, steps of later cells report their share of the norm.
        """
        if self._hooks is not None:
            self._hooks.grad_norm = grad_norm
            self._hooks.set_enabled(is_enabled)

    def at_step_end(self, name: str, callback: Callable[[int], None] | None) -> None:
        """Call `callback` on the main thread with the number of each step that ends; None: stop.

        One that raises is logged, and not called again in this cell, whose end says so.

        Args:
            name: Of the callback; one per name.
            callback: Gets the step's number.
        """
        if self._hooks is not None:
            self._hooks.at_step_end(name, callback)

    def at_due_step(self, callback: Callable[[int], int] | None) -> None:
        """Call `callback` on the main thread at the end of some steps of a cell; None: stop.

        One that raises is logged, and not called again in this cell, whose end says so.

        Args:
            callback: Gets the step's number, and returns the next step's at which it is called. It
                is called at an optimizer's first step in a cell, too, and at the first of each pass
                over a DataLoader.
        """
        if self._hooks is not None:
            self._hooks.on_due = callback

    def at_new_optimizer(
        self, name: str, callback: Callable[[torch.optim.Optimizer], None]
    ) -> None:
        """Call `callback` on the main thread before an optimizer's first step in a cell.

        One that raises is logged, and not called again in this cell; each name has one.
        """
        if self._hooks is not None:
            self._hooks.on_new_optimizer[name] = callback

    def at_backward(
        self, begins: Callable[[Any, Any], None] | None, ended: Callable[[], None] | None = None
    ) -> None:
        """Call `begins` before each outermost backward, `ended` after it; None: stop. Main thread.

        `begins` gets the backward's root and the gradient that it is called with, None for 1.
        Once one raises it is logged, and neither is called again in this cell.
        """
        if self._hooks is not None:
            self._hooks.on_backward, self._hooks.on_backward_end = begins, ended

    def at_fetch(
        self, begins: Callable[[], None] | None, ended: Callable[[Any], None] | None = None
    ) -> None:
        """Call `begins` before each batch that the main thread asks for, `ended` with its iterator.

        None: stop. Once one raises it is logged, and neither is called again in this cell.
        """
        if self._hooks is not None:
            self._hooks.on_fetch, self._hooks.on_fetch_end = begins, ended

    def backwards(self) -> int:
        """Return the backwards of losses since the newest step of the current or last cell."""
        return 0 if self._hooks is None else self._hooks.cell.backwards

    def cell_began(self, start: CellStart) -> None:
        """Count steps from 1 again."""
        self.begin_cell()

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Complete the records of the cell's steps; return their notices."""
        self.end_cell()
        return () if self._hooks is None else self._hooks.notices()

    def begin_cell(self) -> None:
        """A cell begins: steps count from 1 again."""
        if self._hooks is not None:
            self._hooks.begin_cell()

    def end_cell(self) -> int:
        """A cell has ended, failed or not: complete its records, return its steps."""
        return 0 if self._hooks is None else self._hooks.end_cell()

    def note_loss(self, loss: torch.Tensor) -> None:
        """Note the loss of a backward in two halves, whose root no hook sees."""
        if self._hooks is not None:
            self._hooks.note_loss(loss)

    def newest_loss(self) -> float | None:
        """Return the loss of the step that is being made; None where none is known."""
        return None if self._hooks is None else self._hooks.cell.newest_loss()

    def current_step(self) -> int:
        """Return the steps of the current or last cell. Any thread."""
        return 0 if self._hooks is None else self._hooks.cell.step

    def step_of_call(self) -> int | None:
        """Return the step that the newest call of an optimizer belongs to.

        None where that is known when another one's call is over.
        """
        return 0 if self._hooks is None else self._hooks.cell.step_of_call

    def newest_optimizer(self) -> torch.optim.Optimizer | None:
        """Return the optimizer that stepped last in the current or last cell, if it lives."""
        return None if self._hooks is None else self._hooks.newest_optimizer()

    def newest_backwards(self) -> int:
        """Return how many losses the newest step's gradients come from."""
        return 0 if self._hooks is None else self._hooks.cell.newest_backwards

    def current_pass(self) -> tuple[Any, Pass]:
        """Return the DataLoader's iterator that the cell asked last or None, and its pass."""
        return (None, Pass(0, 0)) if self._hooks is None else self._hooks.cell.current_pass

    def passes(self) -> int:
        """Return how many passes over DataLoaders the cell has begun, or gone back to."""
        return 0 if self._hooks is None else self._hooks.cell.passes

    def begun_pass(self) -> Any:
        """Return the iterator of the newest batch that may be trained on, if the cell began it."""
        return None if self._hooks is None else self._hooks.cell.begun_pass

    def is_loading(self) -> bool:
        """Return whether the main thread waits for a DataLoader's batch. Any thread."""
        return self._hooks is not None and self._hooks.is_loading

    def pace(self) -> float:
        """Return the samples a second that this rank has processed by itself; 0: not known."""
        return 0.0 if self._hooks is None else self._hooks.pace()

    def rest_s(self) -> float:
        """Return the seconds of this rank's recent steps without waiting for data; 0: not known."""
        return 0.0 if self._hooks is None else self._hooks.rest_s()

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Observe nothing within the block: it is not training. Main thread.

        The current step has no times: their beginning is no longer known.
        """
        if self._hooks is None:
            yield
            return
        with self._hooks.unseen():
            yield

    def log(self, numbers: dict[str, float]) -> None:
        """Record numbers at the current step, and pass them to the callback of `on_log`, if any."""
        self.log_at(self.current_step(), numbers)

    def log_at(self, step: int | None, numbers: dict[str, float]) -> None:
        """Record numbers at a step, as `log` does; None: the current one."""
        at = self.current_step() if step is None else step
        if self._hooks is not None:
            self._hooks.recorder.add("log", at, numbers)
        if self._on_log is not None:
            self._on_log(at, numbers)

    def on_log(self, callback: Callable[[int, Mapping[str, float]], None]) -> None:
        """Call `callback` with the step and the numbers of each `log`, where no notebook listens.

        The step is 0 if steps are not counted.
        """
        self._on_log = callback


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
    here.log(numbers)


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


here = Training()
