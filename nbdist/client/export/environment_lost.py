"""The environment that the notebook's own cells set, and that its ranks take over. Pure.

Ranks have the kernel's environment of their start: their parent process took it over, and starts
them again after `%dist restart` too. A script has that of its torchrun.
"""

import ast
from collections.abc import Iterable, Sequence

from nbdist.client.export.settings_lost import parsed, running

# A script has its torchrun's, whatever stands before that.
_TORCHRUNS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def variables_in(code: str) -> tuple[str, ...]:
    """Return the variables of the environment that a notebook's own cell sets.

    Args:
        code: As IPython makes it of the cell: `%env NAME=1` is a call there.
    """
    found: list[str] = []
    for node in running(parsed(code)):
        if isinstance(node, ast.Assign):
            found += [name for target in node.targets for name in _subscript(target)]
        elif isinstance(node, ast.AugAssign) and _is_environ(node.target):
            found += _keys(node.value)
        elif isinstance(node, ast.Call):
            found += _of_call(node)
    return tuple(dict.fromkeys(found))


def variables_lost(
    own: Iterable[tuple[int, tuple[str, ...]]],
    commands: Iterable[tuple[int, str]],
    texts: Sequence[str],
) -> list[str]:
    """Return in sentences which variables ranks took over, and a script reads but does not set.

    Args:
        own: Numbers of the notebook's own cells, and the variables that each sets.
        commands: As in `started_anew`.
        texts: What is in the script and in the files beside it.
    """
    if not any("environ" in text or "getenv" in text for text in texts):
        return []
    given = _TORCHRUNS | {name for text in texts for name in variables_in(text)}
    last = max((number for number, command in commands if command == "start"), default=None)
    return [
        f"Cell {number} sets {', '.join(lost)} in the notebook's environment, which its ranks take"
        f" over; the script does not: set {'it' if len(lost) == 1 else 'them'} before torchrun."
        for number, names in own
        if (lost := [name for name in names if name not in given])
        and (last is None or number <= last)
    ]


def _is_environ(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "environ")


def _subscript(target: ast.expr) -> list[str]:
    if isinstance(target, ast.Subscript) and _is_environ(target.value):
        return [_text(target.slice)]
    return []


def _of_call(node: ast.Call) -> list[str]:
    """Return the variables that a call such as `os.environ.setdefault("A", "1")` sets."""
    words = [_text(arg) for arg in node.args]
    if ast.unparse(node.func) == "get_ipython().run_line_magic":
        name, _, value = (words[1] if len(words) == 2 else "").replace("=", " ", 1).partition(" ")
        return [name] if words[0] in ("env", "set_env") and value.strip() else []
    if not isinstance(node.func, ast.Attribute):
        return []
    of, name = node.func.value, node.func.attr
    if (name == "setdefault" and _is_environ(of)) or (name == "putenv" and words):
        return words[:1]
    if name == "update" and _is_environ(of):
        given = [key for arg in node.args for key in _keys(arg)]
        return given + [keyword.arg for keyword in node.keywords if keyword.arg]
    return []


def _keys(node: ast.expr) -> list[str]:
    """Return the keys of a dict that is written down; else how it is."""
    if isinstance(node, ast.Dict):
        return [_text(key) for key in node.keys if key is not None]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict":
        return [keyword.arg for keyword in node.keywords if keyword.arg]
    return [ast.unparse(node)]


def _text(node: ast.expr) -> str:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return str(node.value) if is_text else ast.unparse(node)  # type: ignore[attr-defined]
