"""The hooks in torch that watch training; what they see, they tell the cell.

Only what the main thread does is watched. A hook that fails is switched off for the rest of the
session, logged, and named in a fact; training goes on. Disabled hooks are taken out of torch.

A step inside a function that `torch.compile` compiled is not seen.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from time import thread_time_ns
from typing import Any
from weakref import WeakSet

import torch

from nbdist.engine.compat import torch_hooks
from nbdist.engine.compat.torch_hooks import Closure
from nbdist.engine.kernel.cost_clock import clock, clocked
from nbdist.engine.kernel.records import Recorder
from nbdist.engine.training.cell import Cell, RankMachine
from nbdist.error_text import named

_TELL_PARTS = {"data", "backward"}

_log = logging.getLogger("nbdist.training")


class Hooks:
    """The hooks of one rank. Main thread, but for `is_loading`."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.grad_norm = False
        self.is_loading = False  # the main thread waits for a batch
        self.on_step: dict[str, Callable[[int], None]] = {}  # what else to do when one has ended
        self.on_new_optimizer: dict[str, Callable[[torch.optim.Optimizer], None]] = {}
        self._seen: WeakSet[torch.optim.Optimizer] = WeakSet()  # that have stepped in this cell
        self._machine: RankMachine | None = None
        self._undo: list[torch_hooks.Undo] = []
        self._broken: set[str] = set()
        self._main = threading.main_thread().ident
        self._is_inside = False  # a backward, or a loader: what they call is theirs
        self._guard("processor and memory", self._open_machine)
        self.cell = self._new_cell()

    def _open_machine(self) -> None:
        self._machine = RankMachine()

    def _new_cell(self) -> Cell:
        cell = Cell(self.recorder, self._machine, grad_norm=self.grad_norm)
        cell.knows_parts = self._broken.isdisjoint(_TELL_PARTS)
        return cell

    def set_enabled(self, is_enabled: bool) -> None:
        """Put the hooks in place, or take them out."""
        if is_enabled and not self._undo:
            self._undo = [
                torch_hooks.before_optimizer_step(self._before_optimizer_step),
                torch_hooks.on_optimizer_step(self._after_optimizer_step),
                torch_hooks.wrap_backward(self._around_backward),
                torch_hooks.remember_unscaled(),
                torch_hooks.wrap_next_batch(self._around_next_batch),
            ]
        elif not is_enabled:
            for undo in self._undo:
                undo()
            self._undo = []

    def pace(self) -> float:
        """Return the samples a second that this rank works through; 0: not known."""
        return 0.0 if self._machine is None else self._machine.pace.now()

    def begin_cell(self) -> None:
        """Begin to count at zero."""
        self.cell = self._new_cell()
        clock.begin_cell()
        self._is_inside = self.is_loading = False
        self._seen.clear()

    def end_cell(self) -> int:
        """Record what is still held back; return the steps made."""
        self._guard("loss", self.cell.record_held, wait=True)
        clock.end_cell()
        return self.cell.step

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Watch no backward and no loader; the step that is being made begins anew after it."""
        was, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = was
            self._guard("step", self.cell.begin_anew)

    # -- hooks

    def _is_ours(self) -> bool:
        return threading.get_ident() == self._main and not torch.compiler.is_compiling()

    @clocked("hooks")
    def _before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Closure | None
    ) -> Closure | None:
        if not self._is_ours():
            return None
        # Before the step's record is made, for a fact travels with the records that follow it.
        # What a wrapper such as LocalSGD steps inside is told by the wrapper.
        if optimizer not in self._seen and not self.cell.is_stepping:
            self._seen.add(optimizer)
            for name, callback in self.on_new_optimizer.copy().items():
                self._guard(name, callback, optimizer)
        has_closure = callable(closure)
        is_outermost = self._guard(
            "step", self.cell.optimizer_began, optimizer, has_closure=has_closure
        )
        return self._around_closure(optimizer, closure) if closure and is_outermost else None

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._is_ours():
            return
        cell, was_measured = self.cell, self.cell.is_measured
        began_ns = thread_time_ns() if clock.is_on else 0
        is_closed = self._guard("step", cell.optimizer_ended, optimizer)
        if began_ns:
            clock.add("hooks", thread_time_ns() - began_ns)
        if is_closed:
            self._tell_of_step(cell.step)
            cell.end_clock(was_measured=was_measured)

    @clocked("checks")
    def _tell_of_step(self, step: int) -> None:
        for name, callback in self.on_step.copy().items():
            self._guard(name, callback, step)

    def _around_closure(self, optimizer: torch.optim.Optimizer, native: Closure) -> Closure:
        @wraps(native)
        def closure() -> Any:
            self._guard("step", self.cell.closure_began)
            try:
                return native()
            finally:
                self._guard("step", self.cell.closure_ended, optimizer)

        return closure

    def _around_backward(self, native: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(native)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside or not self._is_ours():
                return native(tensors, *args, **kwargs)
            self._backward_begins(tensors)
            self._is_inside = True
            try:
                return native(tensors, *args, **kwargs)
            finally:
                self._is_inside = False
                self._backward_ends()

        return backward

    @clocked("hooks")
    def _backward_begins(self, tensors: Any) -> None:
        self._guard("backward", self.cell.backward_began)
        self._guard("loss", self.cell.note_loss, tensors)

    @clocked("hooks")
    def _backward_ends(self) -> None:
        self._guard("backward", self.cell.backward_ended)

    def note_loss(self, loss: torch.Tensor) -> None:
        """Take in a loss whose backward is none that can be seen."""
        if self._undo and self._is_ours():
            self._guard("loss", self.cell.note_loss, loss)

    def _around_next_batch(self, native: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(native)
        def __next__(iterator: Any) -> Any:
            if self._is_inside or not self._is_ours():
                return native(iterator)
            self._fetch_begins()
            self._is_inside = self.is_loading = True
            is_batch = False
            try:
                batch = native(iterator)
                is_batch = True
            finally:
                self._is_inside = self.is_loading = False
                self._fetch_ends(iterator, is_batch)
            self._note_batch(batch)
            return batch

        return __next__

    @clocked("hooks")
    def _fetch_begins(self) -> None:
        self._guard("data", self.cell.fetch_began)

    @clocked("hooks")
    def _fetch_ends(self, iterator: Any, is_batch: bool) -> None:
        self._guard("data", self.cell.fetch_ended, iterator, is_batch=is_batch)

    @clocked("hooks")
    def _note_batch(self, batch: Any) -> None:
        self._guard("samples", self.cell.note_batch, batch)

    def _guard(self, hook: str, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do what a hook does; whatever goes wrong ends the hook and not the training."""
        if hook in self._broken:
            return None
        try:
            return action(*args, **kwargs)
        except Exception as error:
            self._broken.add(hook)
            if hook in _TELL_PARTS:
                self.cell.knows_parts = False
            _log.exception("The hook on each %s failed and is switched off", hook)
            self.recorder.fact(**{f"hook_{hook}": f"switched off: {named(error)}"})
            return None
