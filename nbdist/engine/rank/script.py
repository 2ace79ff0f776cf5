"""A script that runs as a cell: `%dist run`. What it finds is what torchrun would give it.

Its source is the cell's, under its own file name, so that interrupts, faults, retries and
tracebacks with its lines are a cell's. Meanwhile `__name__` is `"__main__"` as ever, `__file__` and
`sys.argv` are the script's, and modules beside it can be imported. Its names stay afterwards.

Two things differ for a script: `sys.exit(0)` ends it well, and `dist.destroy_process_group()`, its
last line as a rule, leaves the session's group alone.

Main thread.
"""

import ast
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from nbdist.engine.kernel import location

_undo: list[Callable[[], None]] = []


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
