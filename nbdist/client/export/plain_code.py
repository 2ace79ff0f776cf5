"""A cell's code as a script can hold it: verbatim, what only a notebook has commented out. Pure.

Code is text all the way, so that its comments stay; syntax trees only say where things are.
"""

import ast
import io
import symtable
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from IPython.core.inputtransformer2 import TransformerManager

INDENT = "    "
_TIMING = {"time", "prun", "memit", "mprun", "scalene"}  # they run what follows them
_ASKS = {"input", "getpass", "breakpoint", "get_ipython"}
_OF_NOTEBOOKS = {"current", "start", "attach", "Session", "publish"}  # of nbdist
_CELL = "_cell"  # the coroutine of a cell that awaits
_DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


@dataclass(frozen=True, slots=True)
class PlainCode:
    """A cell's code as plain Python.

    Attributes:
        code: It; where there is a reason, as it stood.
        without: The lines that were commented out, as they stood.
        reason: Why the cell cannot be in a script, in words that follow `cell 5`; "" if it can.
        features: Of `__future__`, which stand above all other code.
        awaits: It awaits outside of a function, as only a notebook's cell can; see `awaited`.
    """

    code: str
    without: tuple[str, ...] = ()
    reason: str = ""
    features: tuple[str, ...] = ()
    awaits: bool = False


def plain(source: str) -> PlainCode:
    """Return a cell's code, without its `%%distributed` line, as a script can hold it."""
    code, without = source.lstrip("\n"), []
    while code.startswith("%%"):
        line, _, code = code.partition("\n")
        name, _, words = line.removeprefix("%%").partition(" ")
        if name != "capture" and (name not in _TIMING or words.strip()):
            return PlainCode(source, reason=f"is a cell of %%{name}")
        without.append(line)
    if _parsed(code) is None:
        code, lines = _without_ipython(code)
        without += lines
    if reason := _why_no_python(code, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT):
        return PlainCode(source, reason=reason)
    awaits = bool(_why_no_python(code))
    code, lines = _without_notebook(code)
    code, features = _without_features(code)
    return PlainCode(code.strip("\n"), (*without, *lines), "", features, awaits)


def awaited(code: str) -> str:
    """Return code that awaits as a script can: in a coroutine, whose names are the script's.

    Raises:
        SyntaxError: It has what no function may, such as `import *`.
    """
    body = indented(code)
    (function,) = symtable.symtable(f"async def {_CELL}():\n{body}", "cell", "exec").get_children()
    names = sorted(symbol.get_name() for symbol in function.get_symbols() if symbol.is_local())
    shared = f"{INDENT}global {', '.join(names)}\n" if names else ""
    text = f"async def {_CELL}():\n{shared}{body}\n\n\nasyncio.run({_CELL}())"
    compile(text, "<cell>", "exec", dont_inherit=True)
    return f"import asyncio\n\n\n{text}"


def commented(code: str) -> str:
    """Return code as comments."""
    return "\n".join(f"# {line}".rstrip() for line in code.split("\n"))


def indented(code: str) -> str:
    """Return `code` one level deeper; lines inside of a text over several lines stay."""
    inside: set[int] = set()
    started: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        name = tokenize.tok_name[token.type]
        if name in ("FSTRING_START", "TSTRING_START"):
            started.append(token.start[0])
        elif name in ("FSTRING_END", "TSTRING_END"):
            inside.update(range(started.pop() + 1, token.end[0] + 1))
        elif token.type == tokenize.STRING:
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
    return "\n".join(
        line if not line.strip() or number in inside else INDENT + line
        for number, line in enumerate(code.split("\n"), 1)
    )


def does_nothing(code: str) -> bool:
    """Return whether code is comments alone, below which an `if` has no body."""
    return not ast.parse(code).body


def _parsed(code: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape: the script says it
            return ast.parse(code)
    except (SyntaxError, ValueError):
        return None


def _why_no_python(code: str, flags: int = 0) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code, "<cell>", "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # null bytes are a ValueError, without a line
        why = getattr(error, "msg", None) or str(error)
        line = getattr(error, "lineno", None)
        return f"is no Python that a script can hold: {why}{f', line {line}' if line else ''}"
    return ""


def _without_ipython(code: str) -> tuple[str, list[str]]:
    """Return code with IPython's lines commented out, and these; of `%time f()` the code stays."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformed = TransformerManager().transform_cell(code)
    tree = _parsed(transformed)
    if tree is None:
        return code, []
    lines, without = transformed.rstrip("\n").split("\n"), []
    for statement, call in sorted(_lines_of(tree), key=lambda one: one[0].lineno):
        at = statement.lineno - 1
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        timed, shown = _timed(call), _shown(statement, call)
        if timed:
            start, column = lines[at].encode(), call.col_offset
            lines[at] = start[:column].decode() + timed
        else:
            without.append(shown)
            lines[at] = f"{indent}pass  # {shown}" if indent else f"# {shown}"
    return "\n".join(lines), without


def _lines_of(tree: ast.Module) -> Iterator[tuple[ast.stmt, ast.Call]]:
    """Yield IPython's lines, as statements of the code that it makes of them."""
    made = {f"get_ipython().{name}" for name in ("run_line_magic", "system", "getoutput")}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr | ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if ast.unparse(node.value.func) in made:
            yield node, node.value


def _words(call: ast.Call) -> list[str]:
    return [str(word.value) for word in call.args if isinstance(word, ast.Constant)]


def _timed(call: ast.Call) -> str:
    """Return the code that a line such as `%time f()` runs; "" of all others."""
    name, *rest = _words(call)
    code = " ".join(rest).strip()
    is_timing = ast.unparse(call.func).endswith("run_line_magic") and name in _TIMING
    return code if is_timing and not code.startswith("-") and _parsed(code) else ""


def _shown(statement: ast.stmt, call: ast.Call) -> str:
    """Return IPython's line as it stood in the cell."""
    name, *rest = _words(call)
    if name in ("pinfo", "pinfo2"):
        return f"{' '.join(rest)}{'?' if name == 'pinfo' else '??'}"
    is_magic = ast.unparse(call.func).endswith("run_line_magic")
    text = f"{'%' if is_magic else '!'}{' '.join([name, *rest]).strip()}"
    if isinstance(statement, ast.Assign):
        return f"{', '.join(ast.unparse(one) for one in statement.targets)} = {text}"
    return text


def _without_notebook(code: str) -> tuple[str, list[str]]:
    """Return code with the statements commented out that need a notebook, or somebody to ask."""
    lines, without = code.split("\n"), []
    for statement in ast.parse(code).body:
        if not any(map(_needs_notebook, _run_at_once(statement))):
            continue
        first, end = statement.lineno - 1, statement.end_lineno or statement.lineno
        without.append(lines[first].strip())
        lines[first:end] = [f"# {line}".rstrip() for line in lines[first:end]]
    return "\n".join(lines), without


def _run_at_once(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement, but for what definitions hold."""
    waiting: list[ast.AST] = [statement]
    for node in waiting:
        yield node
        if not isinstance(node, _DEFINITION):
            waiting += ast.iter_child_nodes(node)


def _needs_notebook(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if isinstance(called, ast.Name):
        return called.id in _ASKS
    return (
        isinstance(called, ast.Attribute)
        and isinstance(called.value, ast.Name)
        and called.value.id == "nbdist"
        and called.attr in _OF_NOTEBOOKS
    )


def _without_features(code: str) -> tuple[str, tuple[str, ...]]:
    """Return code without `from __future__ import`, and the features that it names."""
    features: list[str] = []
    lines = code.split("\n")
    for node in ast.parse(code).body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            features += [alias.name for alias in node.names]
            for at in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[at] = f"# {lines[at]}"
    return "\n".join(lines), tuple(features)
