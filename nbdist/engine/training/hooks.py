"""The hooks in torch that observe training, and report to the cell.

Only the main thread is observed, and autograd's threads that run its backward. A hook
that fails is disabled for the rest of the cell, which says so; it is logged, and named in a
fact; training continues. Disabled hooks are removed from torch.

A step inside a function that `torch.compile` compiled is not seen.
"""

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from time import thread_time_ns
from typing import Any
from weakref import WeakSet, ref

import torch
from torch.compiler import is_compiling

from nbdist.engine.compat import torch_hooks
from nbdist.engine.compat.cuda_graphs import graphs
from nbdist.engine.compat.torch_hooks import (
    Closure,
    StepArgs,
    StepKeywords,
    closure_of,
    with_closure,
)
from nbdist.engine.kernel.backward_threads import is_mains
from nbdist.engine.kernel.cost_clock import clock, clocked
from nbdist.engine.kernel.records import Recorder
from nbdist.engine.training.cell import Cell, RankMachine
from nbdist.shared.error_text import named
from nbdist.shared.text import counted

_PARTS_HOOKS = {"data", "backward"}

_log = logging.getLogger("nbdist.training")


def _none() -> None:
    """Act as a reference to an optimizer."""


class Hooks:
    """The hooks of one rank. Main thread, but for `is_loading`."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.grad_norm = False
        self.is_loading = False  # the main thread waits for a batch
        # Callbacks at the end of a step: replaced, never changed.
        self.on_step: dict[str, Callable[[int], None]] = {}
        # Called at the first step of an optimizer in a cell, at the first of a pass over a
        # DataLoader, and at the one that it has returned: a call costs a step microseconds, and
        # most steps have nothing for it.
        self.on_due: Callable[[int], int] | None = None
        self._due, self._due_passes = 1, 0
        self.on_new_optimizer: dict[str, Callable[[torch.optim.Optimizer], None]] = {}
        # A backward begins, or has ended; most of the time nobody asks.
        self.on_backward: Callable[[Any, Any], None] | None = None
        self.on_backward_end: Callable[[], None] | None = None
        # A batch is asked for, or there; likewise.
        self.on_fetch: Callable[[], None] | None = None
        self.on_fetch_end: Callable[[Any], None] | None = None
        self._seen: WeakSet[torch.optim.Optimizer] = WeakSet()  # that have stepped in this cell
        self._newest: Callable[[], torch.optim.Optimizer | None] = _none  # the last one among them
        self._machine: RankMachine | None = None
        self._undo: list[torch_hooks.Undo] = []
        self._broken: dict[str, str] = {}  # in this cell: the hook, and its error
        self._main = threading.main_thread().ident
        self._is_inside = False  # a backward, or a loader: calls inside belong to it
        self._guard("processor and memory", self._open_machine)
        self.cell = self._new_cell()

    def _open_machine(self) -> None:
        self._machine = RankMachine()

    def _new_cell(self) -> Cell:
        cell = Cell(self.recorder, self._machine, grad_norm=self.grad_norm)
        cell.knows_parts = _PARTS_HOOKS.isdisjoint(self._broken)
        return cell

    def set_enabled(self, is_enabled: bool) -> None:
        """Install the hooks, or remove them."""
        if is_enabled and not self._undo:
            self._undo = [
                torch_hooks.before_optimizer_step(self._before_optimizer_step),
                torch_hooks.on_optimizer_step(self._after_optimizer_step),
                torch_hooks.wrap_backward(self._around_backward),
                torch_hooks.remember_unscaled(),
                torch_hooks.wrap_next_batch(self._around_next_batch),
            ]
            graphs.install()
            graphs.note_loss = self.note_loss
        elif not is_enabled:
            for undo in self._undo:
                undo()
            self._undo = []

    def pace(self) -> float:
        """Return the samples a second that this rank processes; 0: not known."""
        return 0.0 if self._machine is None else self._machine.pace.now()

    def rest_s(self) -> float:
        """Return the seconds of a step without waiting for data; 0: not known."""
        return 0.0 if self._machine is None else self._machine.pace.rest_s()

    def newest_optimizer(self) -> torch.optim.Optimizer | None:
        """Return the optimizer that stepped last in the cell, if it lives."""
        return self._newest()

    def begin_cell(self) -> None:
        """Begin to count at zero, with all hooks: a failed one may work in the next cell."""
        self._broken.clear()
        self.cell = self._new_cell()
        graphs.begin_cell()
        clock.begin_cell()
        self._is_inside = self.is_loading = False
        self._due, self._due_passes = 1, 0
        self._seen.clear()
        self._newest = _none

    def end_cell(self) -> int:
        """Record the steps that are still held; return the steps made."""
        self._guard("loss", self.cell.record_held, wait=True)
        clock.end_cell()
        return self.cell.step

    def at_step_end(self, name: str, callback: Callable[[int], None] | None) -> None:
        """Call `callback` with the number of each step that has ended; None: stop."""
        others = {other: called for other, called in self.on_step.items() if other != name}
        self.on_step = others if callback is None else {**others, name: callback}

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Observe no backward and no loader; the current step begins again after it."""
        was, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = was
            self._guard("step", self.cell.forget_step)

    # -- hooks

    # Those that run at every step do their own guarding and clocking: another Python function costs
    # microseconds there, for torch's work has evicted it from the caches.

    def _before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, args: StepArgs, kwargs: StepKeywords
    ) -> tuple[StepArgs, StepKeywords] | None:
        if (get_ident() != self._main and not is_mains()) or is_compiling():
            return None
        began_ns = thread_time_ns() if clock.is_on else 0
        cell = self.cell
        # Before the step's record is made, for a fact is sent with the records that follow it.
        # The inner optimizer of a wrapper such as LocalSGD is reported by the wrapper.
        if self._newest() is not optimizer and not cell.is_stepping:
            self._begin_optimizer(optimizer)
        closure = closure_of(args, kwargs) if kwargs or len(args) > 1 else None
        is_outermost = False
        if "step" not in self._broken:
            try:
                is_outermost = cell.optimizer_began(optimizer, has_closure=callable(closure))
            except Exception as error:
                self._break("step", error)
        if began_ns:
            left_ns = thread_time_ns()
            clock.add("hooks", left_ns - began_ns + clock.hook.ns)
            clock.left_ns = left_ns if clock.hook.is_wanted else 0  # the boundary's is next
        if closure is None or not is_outermost:
            return None
        return with_closure(args, kwargs, self._around_closure(optimizer, closure))

    def _begin_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Report an optimizer that has not stepped in this cell."""
        self._newest = ref(optimizer)
        if optimizer not in self._seen:
            self._seen.add(optimizer)
            self._due = 0
            self._guard("training", self.cell.first_step_began, optimizer)
            for name, callback in self.on_new_optimizer.copy().items():
                self._guard(name, callback, optimizer)

    def _after_optimizer_step(
        self, optimizer: torch.optim.Optimizer, _args: StepArgs, _kwargs: StepKeywords
    ) -> None:
        if (
            (get_ident() != self._main and not is_mains())
            or is_compiling()
            or "step" in self._broken
        ):
            return
        began_ns = thread_time_ns() if clock.is_on else 0
        cell = self.cell
        was_measured, is_closed = cell.is_measured, False
        try:
            is_closed = cell.optimizer_ended(optimizer)
        except Exception as error:
            self._break("step", error)
        ended_ns = thread_time_ns() if began_ns else 0
        if began_ns:
            clock.add("hooks", ended_ns - began_ns + clock.hook.ns)
            clock.left_ns = 0  # no other hook came in between
        if not is_closed:
            return
        if cell.step >= self._due or cell.passes != self._due_passes:
            self._is_due(cell)
        for name, callback in self.on_step.items():
            if name not in self._broken:
                try:
                    callback(cell.step)
                except Exception as error:
                    self._break(name, error)
        if began_ns:
            clock.add("checks", thread_time_ns() - ended_ns)
        cell.end_clock(was_measured=was_measured)

    def _is_due(self, cell: Cell) -> None:
        self._due, self._due_passes = sys.maxsize, cell.passes
        if self.on_due is not None and "checks" not in self._broken:
            try:
                self._due = self.on_due(cell.step)
            except Exception as error:
                self._break("checks", error)

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
            if graphs.is_capturing:
                graphs.note_captured_loss(tensors)
                return native(tensors, *args, **kwargs)
            if self._is_inside or (get_ident() != self._main and not is_mains()) or is_compiling():
                return native(tensors, *args, **kwargs)
            self._backward_begins(tensors)
            if self.on_backward is not None:
                gradient = args[0] if args else kwargs.get("grad_tensors")
                self._guard("gradients", self.on_backward, tensors, gradient)
            self._is_inside = True
            try:
                return native(tensors, *args, **kwargs)
            finally:
                self._is_inside = False
                self._backward_ends()

        return backward

    def _backward_begins(self, tensors: Any) -> None:
        began_ns = thread_time_ns() if clock.is_on else 0
        cell, broken = self.cell, self._broken
        if "backward" not in broken:
            try:
                cell.backward_began()
            except Exception as error:
                self._break("backward", error)
        if "loss" not in broken:
            try:
                cell.note_loss(tensors)
            except Exception as error:
                self._break("loss", error)
        if began_ns:
            clock.add("hooks", thread_time_ns() - began_ns + clock.hook.ns)

    def _backward_ends(self) -> None:
        began_ns = thread_time_ns() if clock.is_on else 0
        if "backward" not in self._broken:
            try:
                self.cell.backward_ended()
            except Exception as error:
                self._break("backward", error)
        if began_ns:
            clock.add("hooks", thread_time_ns() - began_ns)
        if self.on_backward_end is not None:
            self._guard("gradients", self.on_backward_end)

    def note_loss(self, loss: torch.Tensor) -> None:
        """Note a loss whose backward the hooks cannot see."""
        if self._undo and (get_ident() == self._main or is_mains()) and not is_compiling():
            self._guard("loss", self.cell.note_loss, loss)

    def _around_next_batch(self, native: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(native)
        def __next__(iterator: Any) -> Any:
            if self._is_inside or (get_ident() != self._main and not is_mains()) or is_compiling():
                return native(iterator)
            self._fetch_begins()
            if self.on_fetch is not None:
                self._guard("draws", self.on_fetch)
            self._is_inside = self.is_loading = True
            is_batch = False
            try:
                batch = native(iterator)
                is_batch = True
            finally:
                self._is_inside = self.is_loading = False
                self._fetch_ends(iterator, is_batch)
            self._note_batch(batch)
            if self.on_fetch_end is not None:
                self._guard("draws", self.on_fetch_end, iterator)
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
        """Run a hook's action; an error disables the hook and not the training."""
        if hook in self._broken:
            return None
        try:
            return action(*args, **kwargs)
        except Exception as error:
            self._break(hook, error)
            return None

    def _break(self, hook: str, error: Exception) -> None:
        """Disable a failed hook until the cell ends."""
        self._broken[hook] = named(error)
        if hook in _PARTS_HOOKS:
            self.cell.knows_parts = False
        _log.error("The hook on each %s failed and is disabled", hook, exc_info=error)
        self.recorder.fact(**{f"hook_{hook}": f"switched off: {named(error)}"})

    def notices(self) -> Iterator[str]:
        """Yield the notices of the cell that has ended."""
        if self.cell.replayed:
            steps = counted(self.cell.replayed, "step")
            yield f"{steps} replayed CUDA graphs: what ran inside was not measured."
        if self._broken:
            parts = "; ".join(f"{hook}: {error}" for hook, error in self._broken.items())
            yield f"Losses, times and alarms of this cell are incomplete: a hook failed ({parts})."
