"""Report what a cell has left changed in its process, that the next cells meet without a word.

What the notebook's own code names is meant, be it in the cell or in a function of an earlier one.
What it does not name was changed by something that it has called: a library, a module, a `%run`. Of
a script that runs as a cell all is reported: it would have ended with a process of its own.

Main thread; torch keeps whether gradients are recorded for each thread.
"""

import ast
import gc
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch

from nbdist.shared.wire import DEFAULT_DTYPES

# By whose names code changes a setting.
_SETTERS = {
    "dtype": ("set_default_dtype", "set_default_tensor_type"),
    "gc": ("disable",),
    "grad": ("set_grad_enabled", "__enter__", "enter_context"),
    "anomaly": ("set_detect_anomaly", "detect_anomaly", "set_anomaly_enabled"),
    "stdout": ("stdout", "redirect_stdout"),
    "stderr": ("stderr", "redirect_stderr"),
}
_DEEPEST = 3  # streams around one another
_CAPTURED = (1, 2)  # descriptors whose text a notebook shows


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What of a process decides how any code runs."""

    dtype: torch.dtype
    gc: bool
    grad: bool
    anomaly: bool
    stdout: Any
    stderr: Any

    @classmethod
    def now(cls) -> "ProcessState":
        """Return it as it is; grad is this thread's."""
        return cls(
            torch.get_default_dtype(),
            gc.isenabled(),
            torch.is_grad_enabled(),
            torch.is_anomaly_enabled(),
            sys.stdout,
            sys.stderr,
        )


class LeftChanged:
    """Compares the process after each cell with what it was before."""

    def __init__(self) -> None:
        """Begin, as the process is now."""
        self._before = ProcessState.now()
        self._meant = self._before.dtype
        self._is_script = False

    def cell_began(self, *, is_script: bool) -> None:
        """Note the process as the cell finds it."""
        self._before, self._is_script = ProcessState.now(), is_script

    def in_cell(self, source: str, names: Mapping[str, Any]) -> dict[str, float]:
        """Return what is left changed, as a "left" record has it; nothing where that is meant.

        Args:
            source: The cell's.
            names: What cells have named.
        """
        now = ProcessState.now()
        changed = _changes(self._before, now)
        if now.dtype == self._meant:
            changed.pop("dtype", None)  # a call puts it back
        if changed and not self._is_script:
            used = _names_in_source(source) | _names_in_functions(names)
            changed = {
                name: values for name, values in changed.items() if used.isdisjoint(_SETTERS[name])
            }
        if now.dtype != self._before.dtype and "dtype" not in changed:
            self._meant = now.dtype
        found = {key: value for values in changed.values() for key, value in values.items()}
        return found | {"script": float(self._is_script)} if found else {}


def _changes(before: ProcessState, now: ProcessState) -> dict[str, dict[str, float]]:
    """Return the values of a record by the setting that has changed."""
    found = {}
    if now.dtype != before.dtype:
        was, stays = (
            DEFAULT_DTYPES.index(str(one).removeprefix("torch."))
            for one in (before.dtype, now.dtype)
        )
        found["dtype"] = {"dtype": float(stays), "dtype_before": float(was)}
    if before.gc and not now.gc:
        found["gc"] = {"gc_off": 1.0}
    if before.grad and not now.grad:
        found["grad"] = {"grad_off": 1.0}
    if now.anomaly and not before.anomaly:
        found["anomaly"] = {"anomaly_on": 1.0}
    for name in ("stdout", "stderr"):
        if not _leads_to(getattr(now, name), getattr(before, name)):
            found[name] = {f"{name}_lost": 1.0}
    return found


def _leads_to(stream: Any, before: Any, depth: int = _DEEPEST) -> bool:
    """Return whether text still arrives: a logger beside a file holds the stream from before."""
    if stream is before or _descriptor(stream) in _CAPTURED:
        return True
    if depth == 0 or stream is None:
        return False
    held = [*getattr(stream, "__dict__", {}).values(), getattr(stream, "buffer", None)]
    inner = [each for one in held for each in (one if isinstance(one, list | tuple) else (one,))]
    return any(
        _leads_to(one, before, depth - 1)
        for one in inner
        if one is not None and not isinstance(one, str | bytes | int | float | type)
    )


def _descriptor(stream: Any) -> int | None:
    try:
        number = stream.fileno()
    except Exception:  # any object may be there
        return None
    return number if isinstance(number, int) else None


def _names_in_source(source: str) -> set[str]:
    """Return the names that a cell uses, those of keywords aside: `tqdm(x, disable=True)`."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:  # lines that are IPython's
        return set(re.findall(r"\w+", source))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    plain = {node.id for node in nodes if isinstance(node, ast.Name)}
    return attributes | plain | {node.name for node in nodes if isinstance(node, ast.alias)}


def _names_in_functions(names: Mapping[str, Any]) -> set[str]:
    """Return all names that functions and classes of cells use."""
    own = [one for one in list(names.values()) if getattr(one, "__module__", "") == "__main__"]
    return {name for one in own for code in _codes(one) for name in _names_in(code)}


def _codes(one: Any) -> Iterable[CodeType]:
    if isinstance(one, FunctionType):
        yield one.__code__
        if wrapped := getattr(one, "__wrapped__", None):
            yield from _codes(wrapped)
    elif isinstance(one, type):
        for held in vars(one).values():
            function = getattr(held, "__func__", held)
            if isinstance(function, FunctionType):
                yield from _codes(function)


def _names_in(code: CodeType) -> Iterable[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
