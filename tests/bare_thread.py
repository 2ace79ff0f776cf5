"""Backward as on a GPU, on a CPU: off the main thread, on one that has no Python function below.

Called on ranks, in a cell or in a posted function. The two ways differ in what the main thread
does meanwhile:

- `install`: every backward and `grad` of the main thread runs on a thread of its own, begun by C
  functions alone. The main thread waits as it does in C++: an interrupt strikes when that is over.
- `nested`: autograd hands a backward to a thread of its pool, and the main thread waits for it in
  C++. It does so for the 61st within others (`MAX_DEPTH` in torch/csrc/autograd/engine.h).
"""

import _thread
import operator
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

MAX_DEPTH = 61


class _Engine:
    """Stands for autograd's engine, where torch's own Python calls it."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        is_main = threading.current_thread() is threading.main_thread()
        is_within = torch._C._current_graph_task_id() >= 0
        call = partial(self._native.run_backward, *args, **kwargs)
        return _call_bare(call) if is_main and not is_within else call()


def install() -> None:
    """Run each backward that the main thread calls on a bare thread; a second call adds nothing."""
    native: Any = torch.autograd.Variable._execution_engine
    if not isinstance(native, _Engine):
        torch.autograd.Variable._execution_engine = _Engine(native)  # type: ignore[assignment]


def _call_bare(call: Callable[[], Any]) -> Any:
    """Call a C function on a thread without a Python frame; return or raise what it does."""
    returned: list[Any] = []
    raised: list[BaseException] = []
    is_over = _thread.allocate_lock()
    is_over.acquire()

    def hand_over(failed: Any) -> None:
        raised.append(failed.exc_value)
        is_over.release()

    native, sys.unraisablehook = sys.unraisablehook, hand_over
    interrupt: KeyboardInterrupt | None = None
    try:
        # `list.extend` and `map` call both in turn, and are written in C.
        _thread.start_new_thread(returned.extend, (map(operator.call, (call, is_over.release)),))
        while len(returned) < 2 and not raised:
            try:
                is_over.acquire(timeout=1.0)  # an interrupt may come when it has it, and again
            except KeyboardInterrupt as error:
                interrupt = error
    finally:
        sys.unraisablehook = native
    if raised:
        raise raised[0]
    if interrupt is not None:
        raise interrupt
    return returned[0]


class _Backward(torch.autograd.Function):
    """Calls another backward within its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, within: Callable[[], object]) -> torch.Tensor:
        ctx.within = within
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            ctx.within()
        return gradient, None


def nested(backward: Callable[[], object], depth: int = MAX_DEPTH) -> None:
    """Call `backward`, say `loss.backward`, from within so many others."""
    if depth == 0:
        backward()
        return
    x = torch.ones((), requires_grad=True)
    _Backward.apply(x, partial(nested, backward, depth - 1)).backward()


def remove() -> None:
    """Run backwards on the main thread again."""
    engine: Any = torch.autograd.Variable._execution_engine
    if isinstance(engine, _Engine):
        torch.autograd.Variable._execution_engine = engine._native
