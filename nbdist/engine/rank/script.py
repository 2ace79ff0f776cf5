"""A script that runs as a cell: `%dist run`. It finds the environment that torchrun would give it.

Its source is the cell's, under its own file name, so that interrupts, faults, retries and
tracebacks with its lines are a cell's. Meanwhile `__name__` is `"__main__"` as ever, `__file__` and
`sys.argv` are the script's, and modules beside it can be imported; one that `-m` has called has its
package, and modules beside that. Its names stay afterwards.

Two things differ for a script: `dist.destroy_process_group()`, its last line as a rule, leaves the
session's group alone, and `asyncio.run` runs, though the loop of the rank's kernel does, too.

Modules beside the script are imported again by each run, as by a new process: a user who edits one
and runs the script again means the new text. Those that cells have imported stay, until the file of
one of them has changed since it was read: then all are imported again, for the others may hold
objects of it.

Main thread.
"""

import ast
import asyncio
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import SourceFileLoader
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from nbdist.engine.component import Component, EndedCell
from nbdist.shared import wire
from nbdist.shared.wire import CellStart


class Script(Component):
    """Runs a cell that is a script, and keeps track of the modules that scripts have imported."""

    def __init__(self, shell: Any, read: "ReadFiles") -> None:
        """Begin; `shell` is IPython's, `read` knows which state of a source file was imported."""
        self._shell = shell
        self._read = read
        self._undo: list[Callable[[], None]] = []
        self._imported: set[str] = set()  # by scripts, from beside them

    def cell_began(self, start: CellStart) -> None:
        """Prepare `__main__`, `sys.argv` and modules for a cell that is a script."""
        self._put_back()  # what an aborted cell has left
        if start.script is not None:
            self._begin(start.script)

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Restore the state from before the script."""
        self._put_back()
        return ()

    def _put_back(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _begin(self, asked: wire.Script) -> None:
        shell = self._shell
        file, called = asked.file, asked.module
        package = called.rpartition(".")[0]
        folder = os.path.abspath(os.path.join(file, *[os.pardir] * (called.count(".") + 1)))
        self._forget_modules(folder)
        modules_before = set(sys.modules)
        argv, path, flags = sys.argv, list(sys.path), shell.compile.flags
        names, transformers = shell.user_ns, shell.ast_transformers
        own = {"__file__": file} | ({"__package__": package} if called else {})
        before = {name: names[name] for name in own if name in names}
        sys.argv = [file, *asked.argv]
        sys.path.insert(0, folder)
        names.update(own)
        transformers.append(transformer := _Whole(package))

        put_back = _change_functions()

        def undo() -> None:
            fresh = sys.modules.keys() - modules_before
            self._imported.update(name for name in fresh if _lies_below(folder, name))
            sys.argv, sys.path[:] = argv, path
            for name in own:
                names.pop(name, None)
            names.update(before)
            shell.compile.flags = flags  # of `from __future__ import ...`
            if transformer in transformers:
                transformers.remove(transformer)
            put_back()

        self._undo.append(undo)

    def _forget_modules(self, folder: str) -> None:
        """Forget modules that scripts have imported, and those edited since they were read."""
        beside = {name for name in list(sys.modules) if _lies_below(folder, name)}
        if any(map(self._read.was_edited, beside)):
            self._imported.update(beside)
        for name in self._imported:
            sys.modules.pop(name, None)
        self._imported.clear()
        importlib.invalidate_caches()


def _change_functions() -> Callable[[], None]:
    """Have two functions do what a script means by them; return what puts them back."""
    destroy = dist.destroy_process_group

    def leave_the_default(group: dist.ProcessGroup | None = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    run_beside = functools.partial(_run_beside_the_kernels, asyncio.run)
    name = "destroy_process_group"
    own = [(dist, name, leave_the_default), (c10d, name, leave_the_default)]
    changed: list[tuple[Any, str, Any, Any]] = [
        (module, name, getattr(module, name), new)
        for module, name, new in (*own, (asyncio, "run", run_beside))
    ]
    for module, name, _, new in changed:
        setattr(module, name, new)

    def put_back() -> None:
        for module, name, before, new in changed:
            if getattr(module, name) is new:
                setattr(module, name, before)

    return put_back


def _run_beside_the_kernels(run: Callable[..., Any], main: Any, **options: Any) -> Any:
    """Do as `asyncio.run`, which refuses to run where a loop does: the kernel's, of a cell.

    That one stands still meanwhile, as it does while any code of a cell runs. The functions are
    those of "Extending asyncio" in Python's documentation.
    """
    try:
        kernels, cell = asyncio.get_running_loop(), asyncio.current_task()
    except RuntimeError:
        return run(main, **options)
    if cell is not None:
        asyncio.tasks._leave_task(kernels, cell)
    asyncio.events._set_running_loop(None)
    try:
        return run(main, **options)
    finally:
        asyncio.events._set_running_loop(kernels)
        asyncio.set_event_loop(kernels)
        if cell is not None:
            asyncio.tasks._enter_task(kernels, cell)


class ReadFiles:
    """The state of each source file as it was imported, from now on."""

    def __init__(self) -> None:
        """Record imports from now on, for as long as the process lives."""
        self._states: dict[str, tuple[object, object]] = {}  # mtime and size
        look = SourceFileLoader.path_stats

        @functools.wraps(look)
        def look_and_note(loader: SourceFileLoader, path: str) -> Mapping[str, Any]:
            stats = look(loader, path)
            self._states[path] = stats["mtime"], stats["size"]
            return stats

        SourceFileLoader.path_stats = look_and_note  # type: ignore

    def was_edited(self, name: str) -> bool:
        """Return whether a module's file has changed since it was imported."""
        file = str(sys.modules[name].__file__)
        try:
            now = os.stat(file)
        except OSError:
            return True  # it is gone, and a new process would not find it
        state = now.st_mtime, now.st_size
        return self._states.get(file, state) != state


def _lies_below(folder: str, name: str) -> bool:
    """Return whether a module is the user's own, in the script's folder or below it."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not isinstance(file, str) or name.partition(".")[0] in ("nbdist", "__main__"):
        return False
    place = os.path.abspath(file)
    return place.startswith(os.path.join(folder, "")) and "site-packages" not in place


class _Whole(ast.NodeTransformer):
    """Makes a script one statement, which shows no value; a module's package is imported first."""

    def __init__(self, package: str) -> None:
        self._package = package

    def visit_Module(self, module: ast.Module) -> ast.Module:
        """Return the module with its statements in one."""
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
        if self._package:
            load = ast.parse(f"__import__({self._package!r})").body[0]
            rest = [ast.copy_location(load, rest[0]), *rest]
        whole = ast.If(ast.Constant(value=True), rest, [])
        module.body = [*first, ast.copy_location(whole, rest[0])]
        return ast.fix_missing_locations(module)
