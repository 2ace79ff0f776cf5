"""What is done with a cell's code: displays, indentation, what it asks for. Pure.

Code is text all the way, so that its comments stay; syntax trees only say where things are.
"""

import ast
import io
import math
import re
import tokenize
from collections.abc import Iterator, Set
from typing import Any

INDENT = "    "
# Words of a layout that not every number of ranks can have.
_LAYOUT = re.compile(
    r"\s*(?=.*(?:=\d|hsdp))(?:(?:pp|dp|fsdp|cp|tp|ep)=-?\d+|hsdp|ddp|fsdp|zero[123]|\s+)+\s*"
)
_CHOICES = ast.If | ast.IfExp | ast.Match | ast.BoolOp | ast.Dict
_NAMED = ast.Name | ast.Constant | ast.Tuple | ast.List | ast.expr_context  # computes nothing
_SILENT = {"print", "append", "extend", "update", "barrier", "all_reduce", "broadcast", "backward"}


def indent(code: str) -> str:
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


def with_print(code: str, shows: str, silent: Set[str] = frozenset(), into: str = "_") -> str:
    """Return `code` with its last expression printed, as a notebook displays it.

    Args:
        code: A cell's.
        shows: The condition under which a rank prints, such as `rank == 0`; "" for always.
        silent: Names of functions that return nothing.
        into: The name that what is computed gets: `_`, unless the program has that for its own.
    """
    tree = ast.parse(code)
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        return code
    last = tree.body[-1]
    if _is_silenced(code, last) or _is_silent(last.value, silent):
        return code
    lines = code.split("\n")
    text = ast.get_source_segment(code, last)
    assert text is not None
    assert last.end_lineno is not None
    before = "\n".join(lines[: last.lineno - 1])
    after = "\n".join(lines[last.end_lineno :])
    head = _before_column(lines[last.lineno - 1], last.col_offset).rstrip().rstrip(";")
    if isinstance(last.value, ast.Tuple) and not _is_one_argument(text, last.value):
        text = f"({text})"
    if not all(isinstance(node, _NAMED) for node in ast.walk(last.value)):
        # It may be a collective, also an attribute or a sum may: all ranks do it, and one prints.
        condition = f"{shows} and {into} is not None" if shows else f"{into} is not None"
        shown = [f"{into} = {text}", f"if {condition}:", f"{INDENT}print({into})"]
    else:
        shown = [f"if {shows}:", indent(f"print({text})")] if shows else [f"print({text})"]
    parts = [before, head, *shown, after]
    return "\n".join(part for part in parts if part.strip())


def has_statements(code: str) -> bool:
    """Return whether code does anything; comments do not."""
    return bool(ast.parse(code).body)


def shows(code: str) -> bool:
    """Return whether code ends with an expression that a notebook displays."""
    body = ast.parse(code).body
    return bool(body) and isinstance(body[-1], ast.Expr) and not _is_silenced(code, body[-1])


def _is_one_argument(text: str, value: ast.expr) -> bool:
    """Return whether a call of `print` takes the text for that value, as `(a, b)`, not `(a), b`."""
    call = ast.parse(f"print({text}\n)", mode="eval").body
    assert isinstance(call, ast.Call)
    return [ast.dump(arg) for arg in call.args] == [ast.dump(value)]


def _before_column(line: str, column: int) -> str:
    return line.encode()[:column].decode()


def _is_silenced(code: str, last: ast.Expr) -> bool:
    rest = "\n".join(code.split("\n")[(last.end_lineno or 1) - 1 :])
    return rest.encode()[last.end_col_offset or 0 :].decode().strip().startswith(";")


def _is_silent(value: ast.expr, silent: Set[str]) -> bool:
    if isinstance(value, ast.Constant):
        return value.value is None or value.value is ...
    if not isinstance(value, ast.Call):
        return False
    called = value.func
    name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
    return name in _SILENT or name in silent or name.startswith("assert_")


def silent_functions(code: str) -> set[str]:
    """Return the functions that code defines at its top level and that return nothing."""
    return {
        node.name
        for node in ast.parse(code).body
        if isinstance(node, ast.FunctionDef)
        and not any(
            isinstance(inner, ast.Yield | ast.YieldFrom)
            or (isinstance(inner, ast.Return) and inner.value is not None)
            for inner in ast.walk(node)
        )
    }


def without_features(code: str) -> tuple[str, list[str]]:
    """Return code without its `from __future__ import` lines, and the features that they name."""
    features: list[str] = []
    lines = code.split("\n")
    for node in reversed(ast.parse(code).body):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            features += [alias.name for alias in node.names]
            last = lines[(node.end_lineno or node.lineno) - 1]
            rest = last.encode()[node.end_col_offset or 0 :].decode().lstrip("; ")
            lines[node.lineno - 1 : node.end_lineno] = [rest] if rest else []
    return "\n".join(lines), features


def uses_nbdist(code: str) -> bool:
    """Return whether code names nbdist."""
    return any(
        (isinstance(node, ast.Name) and node.id == "nbdist")
        or (isinstance(node, ast.Import) and any(a.name == "nbdist" for a in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nbdist")
        for node in ast.walk(ast.parse(code))
    )


def layouts(code: str) -> list[str]:
    """Return the texts in code that ask for a certain number of ranks, such as `fsdp=2 tp=2`.

    Of those between which the code chooses, none is sure.
    """
    return [text for text in _sure_texts(ast.parse(code)) if _LAYOUT.fullmatch(text)]


def _sure_texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif not isinstance(node, _CHOICES):
        for child in ast.iter_child_nodes(node):
            yield from _sure_texts(child)


def literal(value: Any) -> str:
    """Return a plain value in Python's notation, which has none of its own for NaN and inf."""
    if isinstance(value, dict):
        parts = ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items())
        return f"{{{parts}}}"
    if isinstance(value, list | tuple):
        parts = ", ".join(map(literal, value))
        if isinstance(value, list):
            return f"[{parts}]"
        return f"({parts},)" if len(value) == 1 else f"({parts})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)
