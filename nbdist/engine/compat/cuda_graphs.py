"""When a CUDA graph is captured, and which optimizers a replay of it lets step.

A capture only writes down what would run, and forbids much of what looks on: to allocate, to copy,
to ask an event. So while one runs none of our hooks does anything; they ask `graphs.is_capturing`.
An optimizer whose `step` was captured steps whenever the graph is replayed: the hooks on optimizers
are called around the replay, as torch calls them around `step`.

Both are seen in the methods of `torch.cuda.CUDAGraph`, which `torch.cuda.graph`,
`make_graphed_callables` and compiled code (`mode="reduce-overhead"`) all call.

Threads: a capture and a replay may be on one of autograd's; `is_capturing` may be read on any.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch

Hook = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Any]
_METHODS = ("capture_begin", "capture_end", "replay")


def check() -> list[str]:
    """Return what this torch lacks of what is wrapped here."""
    return [
        f"torch {torch.__version__}: CUDAGraph.{name} is gone"
        for name in _METHODS
        if not hasattr(torch.cuda.CUDAGraph, name)
    ]


@dataclass(slots=True)
class _Held:
    """What a graph lets happen at each replay: steps, and the loss that they are of."""

    optimizers: list["weakref.ref[torch.optim.Optimizer]"] = field(default_factory=list)
    loss: Callable[[], Any] | None = None


class CudaGraphs:
    """The graphs of this process.

    Attributes:
        is_capturing: One is captured now.
        replays: How many there were since the process began.
        is_stepping: One runs, or the hooks around it, that lets optimizers step.
        note_loss: Called with a loss whose backward was replayed.
    """

    def __init__(self) -> None:
        self.is_capturing = False
        self.replays = 0
        self.is_stepping = False
        self.note_loss: Callable[[Any], object] = lambda _: None
        self._now = _Held()  # what is captured now
        self._held: weakref.WeakKeyDictionary[Any, _Held] = weakref.WeakKeyDictionary()
        self._before: list[Hook] = []
        self._after: list[Hook] = []
        self._is_installed = False

    def install(self) -> None:
        """See captures and replays from here on; a second call does nothing."""
        if self._is_installed:
            return
        self._is_installed = True
        graph: Any = torch.cuda.CUDAGraph
        around = (self._around_begin, self._around_end, self._around_replay)
        for name, wrapper in zip(_METHODS, around, strict=True):
            setattr(graph, name, wrapper(getattr(graph, name)))

    def begin_cell(self) -> None:
        """Mind no capture that a cell before has left without its end."""
        self.is_capturing = False

    def before_steps(self, hook: Hook) -> tuple[Hook, Callable[[], None]]:
        """Return `hook` as torch is to call it before a step, and what takes it out of replays."""
        return self._around_steps(hook, self._before)

    def after_steps(self, hook: Hook) -> tuple[Hook, Callable[[], None]]:
        """Return `hook` as torch is to call it after a step, and what takes it out of replays."""
        return self._around_steps(hook, self._after)

    def _around_steps(self, hook: Hook, hooks: list[Hook]) -> tuple[Hook, Callable[[], None]]:
        def outside_of_captures(
            optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            if self.is_capturing:
                self._note_step(optimizer)
                return None
            return hook(optimizer, args, kwargs)

        hooks.append(hook)
        return outside_of_captures, lambda: hooks.remove(hook)

    def note_captured_loss(self, loss: Any) -> None:
        """A backward of `loss` is captured: each replay gives it a new value."""
        if isinstance(loss, torch.Tensor) and self._now.loss is None:
            self._now.loss = weakref.ref(loss)

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        known = self._now.optimizers
        if all(one() is not optimizer for one in known):
            known.append(weakref.ref(optimizer))

    def _around_begin(self, native: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(native)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._now, self.is_capturing = _Held(), True
            try:
                return native(graph, *args, **kwargs)
            except BaseException:
                self.is_capturing = False
                raise

        return capture_begin

    def _around_end(self, native: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(native)
        def capture_end(graph: Any) -> Any:
            try:
                result = native(graph)
            finally:
                self.is_capturing = False
            if self._now.optimizers:
                self._held[graph] = self._now
            return result

        return capture_end

    def _around_replay(self, native: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(native)
        def replay(graph: Any) -> Any:
            self.replays += 1
            held = self._held.get(graph)
            if held is None:
                return native(graph)
            self.is_stepping = True
            try:
                return self._step(held, lambda: native(graph))
            finally:
                self.is_stepping = False

        return replay

    def _step(self, held: _Held, replay: Callable[[], Any]) -> Any:
        optimizers = [one for each in held.optimizers if (one := each()) is not None]
        for optimizer in optimizers:
            for before in tuple(self._before):
                before(optimizer, (optimizer,), {})
        result = replay()
        if held.loss is not None and (loss := held.loss()) is not None:
            self.note_loss(loss)
        for optimizer in optimizers:
            for after in tuple(self._after):
                after(optimizer, (optimizer,), {})
        return result


graphs = CudaGraphs()
