"""Cells that make the process group, in a script that has made it: taken as done. Pure.

In the notebook ranks have their group before any cell runs, and `init_process_group` is taken as
done there (`engine/compat/torch_init`); so it is below `nbdist.init()`. Torch itself raises.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence

from nbdist.client.export.blocks import Block
from nbdist.client.export.settings_lost import parsed, running

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


def ended_early(blocks: Sequence[Block], modules: Mapping[str, str]) -> list[str]:
    """Return in sentences which cells end the group that cells after them had in the notebook.

    Args:
        blocks: The script's.
        modules: As in `for_modules`.
    """
    kept = [block for block in blocks if block.code]
    whole = "\n".join(block.code for block in kept)
    ends, makes = (_calls_of_modules(modules, whole, name) for name in (_END, _INIT))
    said = []
    for place, block in enumerate(kept):
        later = [other.code for other in kept[place + 1 :]]
        is_made = any(_INIT in code or _called(code) & makes.keys() for code in later)
        if not later or is_made:
            continue
        called = _called(block.code)
        if any(name.rpartition(".")[2] == _END for name in called):
            how = f"calls {_END}"
        elif through := sorted(called & ends.keys()):
            how = f"calls {through[0]}, and {ends[through[0]]} calls {_END} there"
        else:
            continue
        said.append(
            f"Cell {block.number} {how}: the notebook makes the group anew after such a cell, and"
            " the script does not for the cells that follow."
        )
    return said


def _called(code: str) -> set[str]:
    """Return the functions that code calls, each as it is written there."""
    nodes = (node for node in running(ast.parse(code)) if isinstance(node, ast.Call))
    return {ast.unparse(node.func) for node in nodes}


def _calls_of_modules(modules: Mapping[str, str], code: str, wanted: str) -> dict[str, str]:
    """Return as which functions of files beside a script code may call what calls `wanted`.

    Args:
        modules: As in `for_modules`.
        code: Of all cells: it says under which names they know the modules.
        wanted: A function's name.

    Returns:
        The file of each, by the function as cells write it, such as `helper.done`. Methods, and
        what a module calls when it is imported, are not known.
    """
    files = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name
        for name in modules
    }
    inside = {name: _functions_that_call(modules[file], wanted) for name, file in files.items()}
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                for function in inside.get(alias.name, ()):
                    found[f"{alias.asname or alias.name}.{function}"] = files[alias.name]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if alias.name in inside.get(node.module, ()):
                    found[alias.asname or alias.name] = files[node.module]
                whole = f"{node.module}.{alias.name}"
                for function in inside.get(whole, ()):
                    found[f"{alias.asname or alias.name}.{function}"] = files[whole]
                if alias.name == "*":
                    found |= dict.fromkeys(inside.get(node.module, ()), files.get(node.module, ""))
    return found


def _functions_that_call(code: str, wanted: str) -> set[str]:
    """Return a module's functions that call one of this name, also through each other."""
    functions = [node for node in parsed(code).body if isinstance(node, ast.FunctionDef)]
    called = {
        node.name: {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
        for node in functions
    }
    found = {name for name, of in called.items() if wanted in {c.rpartition(".")[2] for c in of}}
    for _ in functions:
        found |= {name for name, of in called.items() if of & found}
    return found


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
