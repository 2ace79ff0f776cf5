"""Whether statements do nothing but draw, so that a script can do without them. Pure.

They may read what the notebook has, and set names; they call what draws, and what only reads. Of
what draws a name is known: an import of a drawing library, or what a call of one has given (`fig`),
or a function in which every statement only draws. All else, a training with a plot in it above all,
may do more.
"""

import ast
import builtins
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from nbdist.client.export.names import root

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_DRAWS = {"matplotlib", "plotly", "seaborn", "bokeh", "altair"}
_WIDGETS = {"ipywidgets", "ipympl", "anywidget", "IPython"}
# Calls that leave what they are given as it is, beside Python's own functions.
_READS = {
    *("arange", "argmax", "asarray", "clone", "copy", "cpu", "cumsum", "detach", "flatten"),
    *("float", "format", "inference_mode", "item", "items", "join", "keys", "linspace", "max"),
    *("mean", "min", "no_grad", "numpy", "permute", "reshape", "round", "size", "squeeze", "std"),
    *("sum", "tolist", "transpose", "unsqueeze", "values", "view"),
}
# Python's functions that do more, or call what they are given.
_ACTS = {
    *("__import__", "delattr", "eval", "exec", "filter", "input", "map", "next", "open", "print"),
    "setattr",
}
# Calls of libraries that draw, or show widgets, which call what they are given: now, or on a click.
_CALLS = {
    *("FuncAnimation", "interact", "interact_manual", "interactive", "interactive_output"),
    *("mpl_connect", "observe", "on_click", "on_submit", "run_cell", "system"),
}
# What a definition may call when it is made, and is the same definition still.
_DECORATES = {
    *("autocast", "cache", "classmethod", "compile", "contextmanager", "dataclass", "enable_grad"),
    *("field", "inference_mode", "lru_cache", "no_grad", "property", "staticmethod"),
}
_AXES = {"ax", "axes", "axs", "fig", "figure"}  # parameters that are given what draws
_SAME = {"list", "reversed", "sorted", "tuple"}  # of axes these are axes


def of_package(name: str) -> str:
    """Return how a module draws, in words that follow `cell 5: it`; "" where it does not."""
    package = name.partition(".")[0]
    if package in _DRAWS:
        return f"draws, with {package}"
    return f"shows widgets or displays, with {package}" if package in _WIDGETS else ""


def reading_functions() -> set[str]:
    """Return Python's own functions that only read, as long as a notebook has no such names."""
    return vars(builtins).keys() - _ACTS


@dataclass(frozen=True, slots=True)
class OnlyDraws:
    """Looks at code.

    Attributes:
        reads: Names of functions that only read.
    """

    reads: AbstractSet[str] = field(default_factory=reading_functions)

    def after(self, body: Sequence[ast.stmt], drawing: AbstractSet[str]) -> AbstractSet[str] | None:
        """Return the names that draw after statements; None where these may do more than draw.

        Args:
            body: The statements.
            drawing: The names that draw before them.
        """
        for statement in body:
            names = self._after(statement, drawing)
            if names is None:
                return None
            drawing = names
        return drawing

    def is_function(self, node: ast.stmt, drawing: AbstractSet[str]) -> bool:
        """Return whether a statement defines a function that does nothing but draw."""
        if not isinstance(node, ast.FunctionDef) or not self.is_only_made(node, drawing):
            return False
        given = {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
        own = given | {name for statement in node.body for name in _stored(statement)}
        return self.after(node.body, drawing - own | given & _AXES) is not None

    def is_only_made(self, node: Definition, drawing: AbstractSet[str]) -> bool:
        """Return whether a definition does nothing else when it is made, as a decorator may."""
        calls = [call for one in _at_once(node) for call in _calls(one)]
        return all(
            _last_word(call.func) in _DECORATES or self._is_harmless(call, drawing)
            for call in calls
        ) and all(_last_word(one) in _DECORATES for one in node.decorator_list)

    def _after(self, node: ast.stmt, drawing: AbstractSet[str]) -> AbstractSet[str] | None:
        match node:
            case ast.Pass() | ast.Break() | ast.Continue():
                return drawing
            case ast.Import(names=names) if all(of_package(alias.name) for alias in names):
                return drawing | _stored(node)
            case ast.ImportFrom(module=module, level=0, names=names):
                is_known = of_package(module or "") and names[0].name != "*"
                return drawing | _stored(node) if is_known else None
            case ast.FunctionDef(name=name):
                return drawing | {name} if self.is_function(node, drawing) else None
            case ast.Expr(value=value) | ast.Return(value=ast.expr() as value):
                return drawing if self._is_drawing(value, drawing) else None
            case ast.Return():
                return drawing
            case ast.Assign(targets=targets, value=value):
                return self._set(drawing, [(target, value) for target in targets])
            case ast.If(test=test, body=body, orelse=other):
                if not self._is_drawing(test, drawing):
                    return None
                return _either(drawing, self.after(body, drawing), self.after(other, drawing))
            case ast.For(target=target, iter=head, body=body, orelse=[]):
                inside = self._set(drawing, [(target, head)])
                ends = None if inside is None else self.after(body, inside)
                # What no longer draws at its end may do more the next time.
                if inside is None or ends is None or inside - ends:
                    return None
                return _either(drawing, ends, drawing)
            case ast.With(items=items, body=body):
                if not all(self._is_drawing(item.context_expr, drawing) for item in items):
                    return None
                named = [(i.optional_vars, i.context_expr) for i in items if i.optional_vars]
                inside = self._set(drawing, named)
                return None if inside is None else self.after(body, inside)
        return None

    def _set(
        self, drawing: AbstractSet[str], given: Sequence[tuple[ast.expr, ast.expr]]
    ) -> AbstractSet[str] | None:
        """Return the names that draw when targets have been given values."""
        found = set(drawing)
        for target, value in given:
            if not self._is_drawing(value, drawing) or not _is_target(target, drawing):
                return None
            found = found - _stored(target) | _drawn(target, value, drawing)
        return found

    def _is_drawing(self, value: ast.expr, drawing: AbstractSet[str]) -> bool:
        """Return whether an expression only draws and reads."""
        acts = ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom
        inside = _inside(value, drawing)
        return all(self._is_harmless(call, inside) for call in _calls(value)) and not any(
            isinstance(node, acts) for node in ast.walk(value)
        )

    def _is_harmless(self, call: ast.Call, drawing: AbstractSet[str]) -> bool:
        if root(call.func) in drawing:
            return _last_word(call.func) not in _CALLS
        if isinstance(call.func, ast.Attribute):
            return call.func.attr in _READS
        return isinstance(call.func, ast.Name) and call.func.id in self.reads


def _last_word(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _last_word(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.Call))


def _stored(node: ast.AST) -> set[str]:
    found = {
        inner.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }
    if isinstance(node, ast.Import | ast.ImportFrom):
        found = {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return found


def _at_once(node: Definition) -> Iterator[ast.AST]:
    """Yield what of a definition runs when it is made."""
    yield from node.decorator_list
    if not isinstance(node, ast.ClassDef):
        yield from (one for one in (*node.args.defaults, *node.args.kw_defaults) if one)
        return
    yield from (*node.bases, *node.keywords)
    for statement in node.body:
        if isinstance(statement, Definition):
            yield from _at_once(statement)
        else:
            yield statement


def _either(
    before: AbstractSet[str], one: AbstractSet[str] | None, other: AbstractSet[str] | None
) -> AbstractSet[str] | None:
    """Return what draws after one of two ways: no name that has got another value on either."""
    if one is None or other is None:
        return None
    return (one | other) - (before - one) - (before - other)


def _is_target(target: ast.expr, drawing: AbstractSet[str]) -> bool:
    """Return whether to set it changes nothing but names, and what draws: `ax.title = a`."""
    if isinstance(target, ast.Tuple | ast.List):
        return all(_is_target(one, drawing) for one in target.elts)
    return isinstance(target, ast.Name) or root(target) in drawing


def _drawn(target: ast.expr, value: ast.expr, drawing: AbstractSet[str]) -> set[str]:
    """Return the names of a target that draw when it gets a value, or what a value holds."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    match target, value:
        case ast.Tuple(elts=names), ast.Tuple(elts=values) if len(names) == len(values):
            pairs = list(zip(names, values, strict=True))
        case ast.Tuple(elts=names), ast.Call(func=ast.Name(id="zip"), args=values):
            if len(names) == len(values):
                pairs = list(zip(names, values, strict=True))
        case ast.Tuple(elts=[_, name]), ast.Call(func=ast.Name(id="enumerate"), args=[one, *_]):
            pairs = [(name, one)]
        case _:
            return _stored(target) if _draws(value, drawing) else set()
    return {name for one, given in pairs for name in _drawn(one, given, drawing)}


def _draws(value: ast.expr, drawing: AbstractSet[str]) -> bool:
    match value:
        case ast.BoolOp(values=values):
            return any(_draws(one, drawing) for one in values)
        case ast.IfExp(body=one, orelse=other):
            return _draws(one, drawing) or _draws(other, drawing)
        case ast.Call(func=ast.Name(id=name), args=[one, *_]) if name in _SAME:
            return _draws(one, drawing)
    return root(value) in drawing


def _inside(value: ast.expr, drawing: AbstractSet[str]) -> AbstractSet[str]:
    """Return the names that draw inside of an expression, which may have names of its own."""
    found = drawing - {node.arg for node in ast.walk(value) if isinstance(node, ast.arg)}
    for node in ast.walk(value):
        if isinstance(node, ast.comprehension):
            found = found - _stored(node.target) | _drawn(node.target, node.iter, found)
    return found
