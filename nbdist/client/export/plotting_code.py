"""What of a cell draws, or shows widgets, taken out where it can be. Pure.

A function that nobody calls draws nothing, cells import matplotlib beside torch, and trainings end
with a plot. So these are taken out alone; a cell stays out where a statement may do more than draw.
"""

import ast
import builtins
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from nbdist.client.export import code as code_of

_DRAWS = {"matplotlib", "plotly", "seaborn", "bokeh", "altair"}
_WIDGETS = {"ipywidgets", "ipympl", "anywidget", "IPython"}
_SHOWS = ("display", "clear_output")  # IPython puts the first into each cell
# Calls that leave what they are given as it is, beside Python's own functions.
_READS = {
    *("argmax", "copy", "cpu", "cumsum", "detach", "flatten", "float", "format", "item", "items"),
    *("join", "keys", "max", "mean", "min", "numpy", "permute", "reshape", "round", "size"),
    *("squeeze", "std", "sum", "tolist", "transpose", "unsqueeze", "values", "view"),
}
# Python's functions that do more, or call what they are given.
_ACTS = {
    *("__import__", "delattr", "eval", "exec", "filter", "input", "map", "next", "open", "print"),
    "setattr",
}


class PlottingCode:
    """Goes through a notebook's cells, and knows the names that draw.

    Attributes:
        reasons: Why a name cannot be in a script, such as `draws, with matplotlib`, by the name.
    """

    def __init__(self) -> None:
        self.reasons = {name: f"calls {name}(), which only a notebook has" for name in _SHOWS}

    def taken_out(self, code: str) -> tuple[str, tuple[str, ...], str]:
        """Return code without what draws, the statements that went, and why it cannot be at all.

        Args:
            code: Of a cell, as plain Python that compiles.
        """
        statements = ast.parse(code).body
        lines = code.split("\n")
        without: list[str] = []
        found = ""
        for statement in statements:
            if not (reason := self._reason(statement)):
                for name in code_of.bound(ast.unparse(statement)):
                    self.reasons.pop(name, None)
                continue
            kept = self._kept(statement, reason) if _stands_alone(statement, lines) else None
            if kept is None:
                found = found or reason
                continue
            text = ast.unparse(statement).split("\n")
            shown = next(line for line in text if not line.startswith("@")).rstrip(":")
            without.append(shown)
            first, last = _extent(statement)
            blank = [""] * (last - first)
            lines[first - 1 : last] = [kept or f"pass  # without: {shown}", *blank]
        if without and len(without) == len(statements):
            found = found or self._reason(statements[0])
        return "\n".join(lines), tuple(without), found

    def _reason(self, statement: ast.stmt) -> str:
        """Return why a statement draws; "" where it does not."""
        imported = [_of_package(name) for node in ast.walk(statement) for name in _packages(node)]
        used = sorted(code_of.needed(ast.unparse(statement)) & self.reasons.keys())
        return next(filter(None, imported), "") or (self.reasons[used[0]] if used else "")

    def _kept(self, statement: ast.stmt, reason: str) -> str | None:
        """Return what stays of a statement, and note its names; None where it cannot be split."""
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.reasons[statement.name] = reason
            return ""
        if isinstance(statement, ast.ImportFrom) and statement.names[0].name != "*":
            self.reasons |= {alias.asname or alias.name: reason for alias in statement.names}
            return ""
        if not isinstance(statement, ast.Import):
            return self._of_drawing(statement, reason)
        others = [alias for alias in statement.names if not _of_package(alias.name)]
        for alias in statement.names:
            if alias not in others:
                name = alias.asname or alias.name.partition(".")[0]
                self.reasons[name] = _of_package(alias.name)
        return ast.unparse(ast.Import(others)) if others else ""

    def _of_drawing(self, statement: ast.stmt, reason: str) -> str | None:
        """Return "" for a statement that does nothing but draw, and note its names; else None."""
        if not _only_draws(statement, self.reasons.keys()):
            return None
        self.reasons |= dict.fromkeys(code_of.bound(ast.unparse(statement)), reason)
        return ""


def _only_draws(statement: ast.stmt, drawing: AbstractSet[str]) -> bool:
    """Return whether a statement does nothing but draw, by names that do."""
    text = ast.unparse(statement)
    if not code_of.needed(text) & drawing:
        return False
    heads: list[ast.expr]
    inside: list[ast.stmt] = []
    match statement:
        case ast.Expr(value) | ast.Assign(value=value):
            heads = [value]
        case ast.For(iter=head, body=inside, orelse=[]) | ast.If(test=head, body=inside, orelse=[]):
            heads = [head]
        case ast.With(items=items, body=inside):
            heads = [item.context_expr for item in items]
        case _:
            return False
    drawing = drawing | code_of.bound(text)  # such as the axes that a loop goes through
    nodes = [node for head in heads for node in ast.walk(head)]
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    acts = ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom
    return (
        all(_root(called) in drawing or _only_reads(called) for called in calls)
        and not any(isinstance(node, acts) for node in nodes)
        and all(_only_draws(one, drawing) for one in inside)
    )


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _only_reads(called: ast.expr) -> bool:
    if isinstance(called, ast.Attribute):
        return called.attr in _READS
    return isinstance(called, ast.Name) and called.id in vars(builtins).keys() - _ACTS


def _packages(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield node.module or ""


def _of_package(name: str) -> str:
    package = name.partition(".")[0]
    if package in _DRAWS:
        return f"draws, with {package}"
    return f"shows widgets or displays, with {package}" if package in _WIDGETS else ""


def _extent(statement: ast.stmt) -> tuple[int, int]:
    """Return its first line, with decorators, and its last."""
    decorators = [d.lineno for d in getattr(statement, "decorator_list", ())]
    return min([statement.lineno, *decorators]), statement.end_lineno or statement.lineno


def _stands_alone(statement: ast.stmt, lines: list[str]) -> bool:
    """Return whether no other statement shares its lines."""
    first, last = _extent(statement)
    return ";" not in lines[first - 1] and ";" not in lines[last - 1]
