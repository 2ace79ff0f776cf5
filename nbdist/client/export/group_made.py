"""Cells that make the process group, in a script that has made it: taken as done. Pure.

In the notebook ranks have their group before any cell runs, and `init_process_group` is taken as
done there (`engine/compat/torch_init`); so it is below `nbdist.init()`. Torch itself raises.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence

from nbdist.client.export.blocks import Block
from nbdist.client.export.settings_lost import running

_INIT, _END = "init_process_group", "destroy_process_group"
_MODULE = "torch.distributed"
_MADE = "is_initialized"  # as of `dist.is_initialized()`
_FOR_MODULES = """\
# As in the notebook, it is taken as done where these make the group: {names}
def taken_as_done(make_group):
    return lambda *args, **more: torch.distributed.is_initialized() or make_group(*args, **more)


torch.distributed.init_process_group = taken_as_done(torch.distributed.init_process_group)
"""
SILENT = frozenset({_INIT, _END})
"""Functions of it that return nothing, so that a cell which ends with one shows nothing."""


def taken_as_done(code: str, whole: str) -> str:
    """Return code in which each statement that makes the group does so only where there is none.

    `dist.init_process_group("gloo")` becomes `dist.is_initialized() or dist.init_process_group(
    "gloo")`, also inside of functions. All else stays as it was typed.

    Args:
        code: Of a cell.
        whole: Of all cells: it says under which names they know `torch.distributed`.
    """
    lines = code.encode().split(b"\n")  # as syntax trees count columns
    for line, column, guard in sorted(_places(code, whole), reverse=True):
        before, after = lines[line - 1][:column], lines[line - 1][column:]
        lines[line - 1] = before + guard.encode() + after
    return b"\n".join(lines).decode()


def for_modules(modules: Mapping[str, str]) -> list[str]:
    """Return the lines by which files beside a script make the group only where there is none.

    Files stay as they are: others may use them too.

    Args:
        modules: What is in them, by their names; "" of what is no Python.
    """
    names = [name for name, text in modules.items() if any(True for _ in _places(text, text))]
    return [_FOR_MODULES.format(names=", ".join(names))] if names else []


def ended_early(blocks: Sequence[Block]) -> list[str]:
    """Return in sentences which cells end the group that cells after them had in the notebook."""
    said = []
    kept = [block for block in blocks if block.code]
    for place, block in enumerate(kept):
        later = "\n".join(other.code for other in kept[place + 1 :])
        if later and _INIT not in later and _calls(block.code, _END):
            said.append(
                f"Cell {block.number} calls {_END}: the notebook makes the group anew after such a"
                " cell, and the script does not for the cells that follow."
            )
    return said


def _calls(code: str, name: str) -> bool:
    nodes = (node for node in running(ast.parse(code)) if isinstance(node, ast.Call))
    return any(ast.unparse(node.func).rpartition(".")[2] == name for node in nodes)


def _places(code: str, whole: str) -> Iterator[tuple[int, int, str]]:
    """Yield where statements make the group, as line and column, and what asks for it there."""
    modules, functions = _names(whole)
    waiting: list[ast.AST] = [ast.parse(code)]
    for node in waiting:
        if isinstance(node, ast.If) and _MADE in ast.unparse(node.test):
            continue  # it asks by itself
        waiting += ast.iter_child_nodes(node)
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
            continue
        called = ast.unparse(node.value.func)
        module, dot, name = called.rpartition(".")
        if name == _INIT and module in modules:
            yield node.lineno, node.col_offset, f"{module}.{_MADE}() or "
        elif not dot and called in functions:
            yield node.lineno, node.col_offset, f"{_MODULE}.{_MADE}() or "


def _names(code: str) -> tuple[set[str], set[str]]:
    """Return the names under which code knows `torch.distributed`, and its function."""
    modules, functions = {_MODULE, "dist"}, set()  # those that each rank finds set
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            modules |= {alias.asname for alias in _of(node.names, _MODULE) if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            modules |= {alias.asname or alias.name for alias in _of(node.names, "distributed")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_MODULE):
            functions |= {alias.asname or alias.name for alias in _of(node.names, _INIT)}
    return modules, functions


def _of(names: Sequence[ast.alias], wanted: str) -> list[ast.alias]:
    return [alias for alias in names if alias.name == wanted]
