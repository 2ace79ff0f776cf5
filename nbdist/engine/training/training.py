"""Watch training with no change to the loop: steps, loss, time for data, time for communication.

Where the numbers come from:

- a *step* ends when an optimizer steps (`steps.StepRule` says which, of several); each makes one
  record of kind "step";
- the *loss* is the scalar on which `backward()` was called, unscaled, the mean of a step's
  backwards (`loss.py`). Roots that are no scalar, and backwards within a backward, are no losses;
- `data_s` is the time between asking a DataLoader for a batch and getting it; `samples` the
  first dimension of the first tensor in the batches a step used, of the loader asked last;
- `step_s` is the wall time from the end of one step to the end of the next, whatever the loop did
  in it. The first step of a cell begins when a batch is first asked for; when none was, its
  beginning was not seen, and it has neither `step_s` nor anything about communication;
- `comm_s` and `comm_total_s` are the tap's exposed and total times (`tap.py` says what they mean);
- `compute_s` is what remains of `step_s` after `comm_s` and `data_s`.

Only what the main thread does is watched. A hook that fails is switched off for the rest of the
session, logged, and named in a fact; training goes on. Disabled hooks are taken out of torch.

A step inside a function that `torch.compile` compiled is not seen.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import wraps
from time import perf_counter_ns
from typing import Any
from weakref import WeakKeyDictionary

import torch

from nbdist.engine.compat import torch_hooks
from nbdist.engine.records import Recorder
from nbdist.engine.tap import tap
from nbdist.engine.training.loss import PendingLoss
from nbdist.engine.training.steps import StepRule, samples_in, steps_in_pass, take_samples
from nbdist.errors import UsageError

MAX_HELD = 64  # steps whose loss has not come back from the GPU

_log = logging.getLogger("nbdist.training")


class _Cell:
    """What is known of the cell that runs."""

    def __init__(self) -> None:
        self.step = 0
        self.rule = StepRule()
        self.began_ns: int | None = None  # the step
        self.is_whole = False  # whether the step was seen from its beginning
        self.loss = PendingLoss()
        self.backwards = 0
        self.data_ns = 0
        self.fetched: deque[int] = deque(maxlen=4096)  # samples of each batch of one iterator
        self.iterator: Any = None
        self.passes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # step each pass began at
        self.held: deque[tuple[int, dict[str, float], PendingLoss]] = deque()

    def begin_step(self, *, is_whole: bool) -> None:
        """The first sign of training in this cell; what was communicated before is no step's."""
        if self.began_ns is None:
            self.began_ns = perf_counter_ns()
            self.is_whole = is_whole
            tap.take()


class Training:
    """The hooks of one rank."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.cell = _Cell()
        self._undo: list[torch_hooks.Undo] = []
        self._broken: set[str] = set()
        self._main = threading.main_thread().ident
        self._is_inside = False  # a backward, or a loader: what they call is theirs
        self.is_loading = False  # the main thread waits for a batch
        self.on_step: Callable[[int], None] | None = None  # what else to do when one has ended

    def set_enabled(self, is_enabled: bool) -> None:
        """Put the hooks in place, or take them out."""
        if is_enabled and not self._undo:
            self._undo = [
                torch_hooks.on_optimizer_step(self._after_optimizer_step),
                torch_hooks.wrap_backward(self._around_backward),
                torch_hooks.remember_unscaled(),
                torch_hooks.wrap_next_batch(self._around_next_batch),
            ]
        elif not is_enabled:
            for undo in self._undo:
                undo()
            self._undo = []

    def begin_cell(self) -> None:
        """Begin to count at zero."""
        self.cell = _Cell()
        self._is_inside = self.is_loading = False

    def end_cell(self) -> int:
        """Record what is still held back; return the steps made."""
        self._guard("loss", lambda: self._record_held(wait=True))
        return self.cell.step

    # -- hooks

    def _is_watching(self) -> bool:
        return (
            threading.get_ident() == self._main
            and not self._is_inside
            and not torch.compiler.is_compiling()
        )

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if threading.get_ident() == self._main and not torch.compiler.is_compiling():
            self._guard("step", lambda: self._on_optimizer_step(id(optimizer)))

    def _on_optimizer_step(self, optimizer: int) -> None:
        if self.cell.rule.closes(optimizer):
            self._close_step()

    def _around_backward(self, native: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(native)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_watching():
                return native(tensors, *args, **kwargs)
            self._guard("loss", lambda: self._on_loss(tensors))
            self._is_inside = True
            tap.backward_began()
            try:
                return native(tensors, *args, **kwargs)
            finally:
                self._is_inside = False
                self._guard("communication", tap.backward_ended)

        return backward

    def _on_loss(self, tensors: Any) -> None:
        self.cell.begin_step(is_whole=False)
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if len(roots) == 1 and self.cell.loss.add(roots[0]):
            self.cell.backwards += 1

    def _around_next_batch(self, native: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(native)
        def __next__(iterator: Any) -> Any:
            if not self._is_watching():
                return native(iterator)
            self._guard("data", lambda: self.cell.begin_step(is_whole=True))
            began_ns = perf_counter_ns()
            self._is_inside = self.is_loading = True
            try:
                batch = native(iterator)
            finally:
                self._is_inside = self.is_loading = False
                self.cell.data_ns += perf_counter_ns() - began_ns
            self._guard("data", lambda: self._on_batch(iterator, batch))
            return batch

        return __next__

    def _on_batch(self, iterator: Any, batch: Any) -> None:
        cell = self.cell
        if torch_hooks.batch_number(iterator) == 1 or iterator not in cell.passes:
            cell.passes[iterator] = cell.step
        if iterator is not cell.iterator:  # say, back from validation
            cell.iterator = iterator
            cell.fetched.clear()
        cell.fetched.append(samples_in(batch))

    # -- records

    def _close_step(self) -> None:
        cell = self.cell
        now_ns = perf_counter_ns()
        cell.step += 1
        traffic = tap.take(cell.step)
        if traffic.calls is not None:
            self.recorder.add("calls", cell.step, {}, traffic.calls)
        values: dict[str, float] = {}
        comm_s, data_s = traffic.exposed_ns / 1e9, cell.data_ns / 1e9
        if cell.began_ns is not None and cell.is_whole:
            step_s = (now_ns - cell.began_ns) / 1e9
            values["step_s"] = step_s
            values["compute_s"] = max(0.0, step_s - comm_s - data_s)
            values |= _communication(traffic)
        values["data_s"] = data_s
        samples = take_samples(cell.fetched, cell.backwards)
        if samples:
            values["samples"] = samples
        total = self._expected_steps()
        if total is not None:
            values["total"] = total
        cell.held.append((cell.step, values, cell.loss))
        cell.loss = PendingLoss()
        cell.backwards = cell.data_ns = 0
        cell.began_ns, cell.is_whole = now_ns, True
        self._record_held(wait=False)
        if self.on_step is not None:
            self.on_step(cell.step)

    def _expected_steps(self) -> int | None:
        """Return the step that ends the pass over the loader, where its length is known."""
        cell = self.cell
        if cell.iterator is None:
            return None
        batches = torch_hooks.batch_count(cell.iterator)
        began = cell.passes.get(cell.iterator)
        if batches is None or began is None or cell.step <= began:
            return None
        return began + steps_in_pass(
            batches,
            batches_taken=torch_hooks.batch_number(cell.iterator),
            steps_made=cell.step - began,
            backwards=cell.backwards,
        )

    def _record_held(self, *, wait: bool) -> None:
        held = self.cell.held
        while held and (wait or held[0][2].is_ready or len(held) > MAX_HELD):
            step, values, loss = held.popleft()
            mean = loss.mean()
            if mean is not None:
                values = {"loss": mean, **values}
            self.recorder.add("step", step, values)

    def _guard(self, hook: str, action: Callable[[], None]) -> None:
        """Do what a hook does; whatever goes wrong ends the hook and not the training."""
        if hook in self._broken:
            return
        try:
            action()
        except Exception as error:
            self._broken.add(hook)
            _log.exception("The hook on each %s failed and is switched off", hook)
            self.recorder.fact(**{f"hook_{hook}": f"switched off: {type(error).__name__}: {error}"})


def _communication(traffic: tap.Traffic) -> dict[str, float]:
    if tap.level() == "off":
        return {}
    values = {
        "comm_s": traffic.exposed_ns / 1e9,
        "bytes": float(traffic.bytes),
        "collectives": float(traffic.collectives),
    }
    if traffic.total_ns is not None:
        values["comm_total_s"] = traffic.total_ns / 1e9
    return values


_training: Training | None = None


def install(recorder: Recorder) -> None:
    """Put the hooks in place; their records go to `recorder`."""
    global _training
    if _training is None:
        _training = Training(recorder)
    _training.recorder = recorder
    _training.set_enabled(True)


def set_enabled(is_enabled: bool) -> None:
    """Switch the hooks on or off; off, nothing of them is left in torch."""
    if _training is not None:
        _training.set_enabled(is_enabled)


def at_step_end(callback: Callable[[int], None] | None) -> None:
    """Call `callback` on the main thread with the number of each step that ends; None: no more."""
    if _training is not None:
        _training.on_step = callback


def begin_cell() -> None:
    """A cell begins: steps count from 1 again."""
    if _training is not None:
        _training.begin_cell()


def end_cell() -> int:
    """A cell has ended, however: complete its records, return the steps it made."""
    return 0 if _training is None else _training.end_cell()


def current_step() -> int:
    """Return the steps of the current or last cell. Any thread."""
    return 0 if _training is None else _training.cell.step


def is_loading() -> bool:
    """Return whether the main thread waits for a DataLoader's batch. Any thread."""
    return _training is not None and _training.is_loading


def log(**values: object) -> None:
    """Record numbers of your own at the current step, beside the automatic ones.

    Args:
        values: Numbers: Python's, numpy's, or tensors of one element.

    Raises:
        UsageError: A value is no number; nothing was recorded.

    Outside a cluster, in an exported script, it checks its arguments and does nothing more.
    """
    if not values:
        raise UsageError("nbdist.log takes numbers by name, such as nbdist.log(accuracy=0.93).")
    numbers = {name: _number(name, value) for name, value in values.items()}
    if _training is not None:
        _training.recorder.add("log", _training.cell.step, numbers)


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
