"""A script that runs as a cell: `%dist run`. What it finds is what torchrun would give it.

Its source is the cell's, under its own file name, so that interrupts, faults, retries and
tracebacks with its lines are a cell's. Meanwhile `__name__` is `"__main__"` as ever, `__file__` and
`sys.argv` are the script's, and modules beside it can be imported. Its names stay afterwards.

Two things differ for a script: `sys.exit(0)` ends it well, and `dist.destroy_process_group()`, its
last line as a rule, leaves the session's group alone.

Modules beside the script are imported anew by each run, as they would be by a new process: whoever
edits one and runs the script again means the new text. Those that cells have imported stay.

Main thread.
"""

import ast
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from nbdist.engine.kernel import location

_undo: list[Callable[[], None]] = []
_imported: set[str] = set()  # by scripts, from beside them


def begin_cell(told: Mapping[str, Any] | None, shell: Any) -> None:
    """Begin a cell; where it is a script, let it find what a script finds.

    Args:
        told: Its `file`, as the notebook has it, and `argv`; None for a cell that is none.
        shell: IPython's.
    """
    end_cell()  # what a cell that was cut off has left
    if told is None:
        return
    file: str = told["file"]
    _forget_modules()
    modules_before = set(sys.modules)
    argv, path, flags = sys.argv, list(sys.path), shell.compile.flags
    names, transformers = shell.user_ns, shell.ast_transformers
    before = {name: names[name] for name in ("__file__",) if name in names}
    modules: tuple[Any, ...] = (dist, c10d)
    destroy = dist.destroy_process_group
    location.script = file
    sys.argv = [file, *told["argv"]]
    sys.path.insert(0, os.path.dirname(file))
    names["__file__"] = file
    transformers.append(transformer := _Whole())

    def leave_the_default(group: dist.ProcessGroup | None = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    for module in modules:
        module.destroy_process_group = leave_the_default

    def undo() -> None:
        fresh = sys.modules.keys() - modules_before
        _imported.update(name for name in fresh if _lies_below(os.path.dirname(file), name))
        location.script = None
        sys.argv, sys.path[:] = argv, path
        names.pop("__file__", None)
        names.update(before)
        shell.compile.flags = flags  # of `from __future__ import ...`
        if transformer in transformers:
            transformers.remove(transformer)
        for module in modules:
            if module.destroy_process_group is leave_the_default:
                module.destroy_process_group = destroy

    _undo.append(undo)


def end_cell() -> None:
    """Put back what was there before the script."""
    while _undo:
        _undo.pop()()


def _forget_modules() -> None:
    for name in _imported:
        sys.modules.pop(name, None)
    _imported.clear()
    importlib.invalidate_caches()


def _lies_below(folder: str, name: str) -> bool:
    """Return whether a module is the user's own, in the script's folder or below it."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not isinstance(file, str) or name.partition(".")[0] == "nbdist":
        return False
    place = os.path.abspath(file)
    return place.startswith(os.path.join(folder, "")) and "site-packages" not in place


class _Whole(ast.NodeTransformer):
    """Makes a script one statement, which shows no value and takes `sys.exit(0)` for its end."""

    def visit_Module(self, module: ast.Module) -> ast.Module:
        """Return the module with its statements in a `try`."""
        count = 0
        for node in module.body:  # these must come first
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
            if not (is_text and not count) and not is_future:
                break
            count += 1
        first, rest = module.body[:count], module.body[count:]
        if not rest:
            return module
        # A bare `raise` keeps the script's own line in the traceback.
        (guard,) = ast.parse(_GUARD).body
        assert isinstance(guard, ast.Try)
        guard.body = rest
        module.body = [*first, ast.copy_location(guard, rest[0])]
        return ast.fix_missing_locations(module)


_GUARD = """
try:
    pass
except SystemExit as _end:
    if _end.code not in (None, 0):
        raise
"""
