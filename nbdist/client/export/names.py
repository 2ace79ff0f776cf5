"""Which names a cell's code gives, takes and changes, and what their values stand on. Pure."""

import ast
import symtable
from collections.abc import Iterator, Set
from dataclasses import dataclass

from nbdist.client.export.flow import before_each, flow_of


def bound(code: str) -> set[str]:
    """Return the names that code binds at its top level."""
    table = symtable.symtable(code, "cell", "exec")
    return {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    } | {name for scope in _scopes(table) for name in _declared(scope)}


IMPORTED = "import "


def bindings(code: str) -> dict[str, set[str]]:
    """Return for each name that code binds at its top level the texts of what binds it.

    An import is `IMPORTED` and what is imported, however it is written; what an `if` holds is
    looked at by itself.
    """
    found: dict[str, set[str]] = {}
    waiting = list(ast.parse(code).body)
    for statement in waiting:
        if isinstance(statement, ast.If):
            waiting += [*statement.body, *statement.orelse]
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            texts = _imports(statement)
        else:
            text = ast.unparse(statement)
            texts = dict.fromkeys(bound(text), text)
        for name, text in texts.items():
            found.setdefault(name, set()).add(text)
    return found


def _imports(statement: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """Return the names that an import gives, and what each is."""
    if isinstance(statement, ast.ImportFrom):
        module = "." * statement.level + (statement.module or "")
        return {a.asname or a.name: f"{IMPORTED}{module}.{a.name}" for a in statement.names}
    return {
        a.asname or a.name.partition(".")[0]: IMPORTED
        + (a.name if a.asname else a.name.partition(".")[0])
        for a in statement.names
    }


def _declared(scope: symtable.SymbolTable) -> Iterator[str]:
    for symbol in scope.get_symbols():
        if symbol.is_declared_global() and symbol.is_assigned():
            yield symbol.get_name()


def _is_global(symbol: symtable.Symbol) -> bool:
    """Return whether a symbol of a function or class is a global.

    symtable takes each scope called `top` for the module, whose locals are globals, too.
    """
    return symbol.is_global() and (symbol.is_declared_global() or not symbol.is_local())


def needed(code: str) -> set[str]:
    """Return the names that code, its functions too, takes from elsewhere, or may take."""
    flow = flow_of(code)
    called = {
        symbol.get_name()
        for scope in _scopes(symtable.symtable(code, "cell", "exec"))
        for symbol in scope.get_symbols()
        if _is_global(symbol) and symbol.is_referenced()
    }
    return set(flow.reads | (called - flow.binds))


def needed_at_once(code: str) -> set[str]:
    """Return those of the `needed` names that are read when code runs, not when it is called.

    Of definitions these are defaults, decorators, bases, and what stands in the body of a class.
    """
    return set(flow_of(code).reads)


def taken(code: str) -> dict[str, frozenset[str]]:
    """Return the names that code takes from elsewhere when it runs, and what is bound by then.

    A function that it defines takes its names where it is used; where that is not in this code,
    they are not among these.
    """
    found: dict[str, frozenset[str]] = {}
    own: dict[str, Standing] = {}
    for statement, before in zip(ast.parse(code).body, before_each(code), strict=True):
        text = ast.unparse(statement)
        read = needed_at_once(text) if _is_definition(statement) else needed(text)
        for name in sorted((read | _looked_up(own, read)) - before):
            found.setdefault(name, before)
        own = _with(own, statement)
    return found


def _is_definition(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return not statement.decorator_list  # which may call it at once
    return isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Lambda)


def _looked_up(own: "dict[str, Standing]", names: Set[str]) -> set[str]:
    """Return what values are looked up when names are used that code has given itself."""
    waiting, found = list(names), set[str]()
    for name in waiting:
        if name in own:
            found |= own[name].looks_up
            waiting += sorted((own[name].looks_up | own[name].made_with) - set(waiting))
    return found


@dataclass(frozen=True, slots=True)
class Standing:
    """What the value of a name stands on.

    Attributes:
        made_with: Names that were read when it was made, or changed.
        looks_up: Names that it looks up when it is called, as a function does.
    """

    made_with: frozenset[str]
    looks_up: frozenset[str]


def standing(code: str) -> dict[str, Standing]:
    """Return for each name that code binds or changes at its top level what it stands on."""
    found: dict[str, Standing] = {}
    for statement in ast.parse(code).body:
        found = _with(found, statement)
    return found


def _with(known: dict[str, Standing], statement: ast.stmt) -> dict[str, Standing]:
    """Return what names stand on when one more statement has run."""
    text = ast.unparse(statement)
    at_once = needed_at_once(text)
    later = needed(text) - at_once
    found = dict(known)
    for name in bound(text) | set(_changed(statement)):
        before = known.get(name, Standing(frozenset(), frozenset()))
        found[name] = Standing(before.made_with | at_once, before.looks_up | later)
    return found


def _changed(statement: ast.stmt) -> Iterator[str]:
    """Yield `a` where something of it is set, or one of its methods is called: `a.b[0] = c`."""
    for node in ast.walk(statement):
        changed: ast.expr | None = None
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            changed = node
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            changed = node.value.func
        if changed is not None and not isinstance(changed, ast.Name) and (name := root(changed)):
            yield name


def root(node: ast.expr) -> str:
    """Return the name with which an expression begins, `a` of `a.b[0].c()`; "" for none."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _scopes(child)
