"""What IPython alone understands in a cell, taken out of it line by line. Pure.

A script loses little by a `%time` or an `!ls`. A line that could change what is computed keeps its
whole cell out instead.
"""

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from IPython.core.inputtransformer2 import TransformerManager

# Run, or time, the code that follows them on their line, or in their cell.
_TIMES = {"time", "prun", "memit", "mprun", "scalene"}
# A script does the same without them.
_DROPPED = {
    *("alias", "autoawait", "autocall", "automagic", "autoreload", "aimport", "colors", "config"),
    *("conda", "dhist", "hist", "history", "ll", "load_ext", "logoff", "logon", "logstart", "ls"),
    *("logstop", "lsmagic", "magic", "mamba", "matplotlib", "micromamba", "pdb", "pdef", "pdoc"),
    *("pfile", "pinfo", "pinfo2", "pip", "pprint", "precision", "psearch", "psource", "pwd"),
    *("quickref", "reload_ext", "timeit", "unload_ext", "uv", "who", "who_ls", "whos", "xmode"),
}


_HELPS = {"pinfo": "?", "pinfo2": "??"}


@dataclass(frozen=True, slots=True)
class PlainCode:
    """A cell's code as plain Python.

    Attributes:
        code: It; as far as it goes, where there is a reason.
        without: The lines that were taken out, as they stood. Of those that time code it stays.
        reason: Why the cell cannot be in a script, in words that follow `cell 5: it`; "" if it can.
    """

    code: str
    without: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of IPython's, as a statement of the code that IPython makes of it."""

    statement: ast.stmt
    call: ast.Call

    @property
    def kind(self) -> str:
        """`run_line_magic`, `system` or `getoutput`."""
        assert isinstance(self.call.func, ast.Attribute)
        return self.call.func.attr

    @property
    def words(self) -> list[str]:
        return [str(arg.value) for arg in self.call.args if isinstance(arg, ast.Constant)]

    @property
    def shown(self) -> str:
        """As it stood in the cell."""
        words = " ".join(self.words).strip()
        if self.words[0] in _HELPS:
            return f"{' '.join(self.words[1:])}{_HELPS[self.words[0]]}"
        text = f"%{words}" if self.kind == "run_line_magic" else f"!{words}"
        if isinstance(self.statement, ast.Assign):
            targets = ", ".join(ast.unparse(target) for target in self.statement.targets)
            return f"{targets} = {text}"
        return text


def plain(code: str) -> PlainCode:
    """Return a cell's code without what only IPython understands.

    Args:
        code: Of a cell, without its `%%distributed` line; one that is no Python at all returns as
            it is.
    """
    head, _, rest = code.lstrip("\n").partition("\n")
    if head.startswith("%%"):
        return _of_cell_magic(head, rest)
    if _parsed(code):
        return PlainCode(code)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformed = TransformerManager().transform_cell(code)
    tree = _parsed(transformed)
    if tree is None:
        return PlainCode(code)
    without: list[str] = []
    reasons: list[str] = []
    lines = transformed.split("\n")
    for line in sorted(_lines_of(tree), key=lambda one: one.statement.lineno):
        text = _replacement(line)
        if text is None:
            reasons.append(_only_ipython(line.shown))
            continue
        if text.startswith("pass"):
            without.append(line.shown)
        first = lines[line.statement.lineno - 1]
        indent = first[: len(first) - len(first.lstrip())]
        lines[line.statement.lineno - 1] = indent + text
    left = "\n".join(lines).rstrip("\n")
    if without and all(isinstance(statement, ast.Pass) for statement in ast.parse(left).body):
        reasons.append(_only_ipython(without[0]))
    return PlainCode(left, tuple(without), reasons[0] if reasons else "")


def inner(source: str) -> str:
    """Return a cell without lines such as `%%time` above it, which change nothing that it does."""
    source = source.lstrip("\n")
    head, _, rest = source.partition("\n")
    if is_timing(head) or head.partition(" ")[0] == "%%capture":
        return inner(rest)
    return source


def is_timing(head: str) -> bool:
    """Return whether a cell's first line, such as `%%time`, only says that it is timed."""
    name, _, words = head.removeprefix("%%").partition(" ")
    return name in _TIMES and not words.strip()


def _of_cell_magic(head: str, rest: str) -> PlainCode:
    """Return what a cell within the cell comes to, such as that of `%%time`."""
    inside = plain(rest)
    if is_timing(head):
        return inside
    return PlainCode(inside.code, inside.without, _only_ipython(head))


def _only_ipython(text: str) -> str:
    return f"has {text!r}, which only IPython understands"


def _parsed(code: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except (SyntaxError, ValueError):
        return None


def _lines_of(tree: ast.Module) -> Iterator[_Line]:
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr | ast.Assign) else None
        if isinstance(node, ast.stmt) and isinstance(value, ast.Call) and _is_ipythons(value):
            yield _Line(node, value)


def _is_ipythons(call: ast.Call) -> bool:
    return ast.unparse(call.func) in {
        f"get_ipython().{name}" for name in ("run_line_magic", "system", "getoutput")
    }


def _replacement(line: _Line) -> str | None:
    """Return what stands in the line's place; None where nothing can."""
    name, *rest = line.words
    if line.kind == "run_line_magic" and name in _TIMES:
        code = " ".join(rest).strip()
        if isinstance(line.statement, ast.Assign) and code:
            code = line.shown.partition("%")[0] + code
        return code if _parsed(code) and not code.startswith("-") and code else None
    if isinstance(line.statement, ast.Assign):
        return None  # what it says is used
    is_known = line.kind != "run_line_magic" or name in _DROPPED
    return f"pass  # without: {line.shown}" if is_known else None
