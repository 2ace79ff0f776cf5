"""What `%dist push` has sent, as Python code: literals, and functions with what they read.

It is written down when it is sent, from the objects themselves: a function by its source, and the
plain globals, functions, classes and modules of the notebook that it reads. So a cell that is
edited later, or fails, changes nothing of it.
"""

import ast
import builtins
import dataclasses
import inspect
import linecache
import logging
import math
import symtable
import sys
import textwrap
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import EnumType
from typing import Any

from nbdist.shared import plain
from nbdist.shared.wire import NAMES_OF_A_RANK

log = logging.getLogger(__name__)

_NOTEBOOK = "__main__"


@dataclass(frozen=True, slots=True)
class Sent:
    """A name that ranks were sent.

    Attributes:
        name: On the ranks.
        code: Statements that give it, and what it reads, by their names in order.
        trouble: Why there is no code, in words that follow `pushes NAME:`; "" where there is.
        ranks: To which it went, as `%dist push -r` has it.
    """

    name: str
    code: tuple[tuple[str, str], ...] = ()
    trouble: str = ""
    ranks: str = "all"


class _NoCodeError(Exception):
    """An object that no code gives; the text says which, in words that follow `f:`."""


def sent(name: str, value: object, ranks: str = "all") -> Sent:
    """Return what is remembered of a value that is sent to the ranks now."""
    found: dict[str, str] = {}
    try:
        _write(name, value, found)
    except _NoCodeError as error:
        return Sent(name, (), str(error), ranks)
    except Exception as error:  # sources and reprs come from wherever
        log.info("What %s is cannot be written down", name, exc_info=True)
        return Sent(name, (), f"its source cannot be read ({type(error).__name__})", ranks)
    return Sent(name, tuple(found.items()), "", ranks)


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


def _write(name: str, value: object, found: dict[str, str]) -> None:
    """Add the statement that gives `name` to `found`, below those that it stands on."""
    if name in found:
        return
    if isinstance(value, types.ModuleType):
        is_own = value.__name__ == name
        found[name] = f"import {name}" if is_own else f"import {value.__name__} as {name}"
    elif plain.is_plain(value):
        found[name] = f"{name} = {literal(value)}"
    elif imported := _import_of(name, value):
        found[name] = imported
    elif isinstance(value, types.FunctionType | type):
        _write_definition(name, value, found)
    elif dataclasses.is_dataclass(value) and type(value).__module__ == _NOTEBOOK:
        _write_dataclass(name, value, found)
    else:
        kind = f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
        kind = kind.removeprefix(f"{_NOTEBOOK}.")
        large = type(value) in (list, tuple, dict, str)  # not one of their kinds: it is never plain
        is_what = "too large, or holds more than plain values" if large else "no plain value"
        raise _NoCodeError(f"{name} is a {kind}, which is {is_what}")


def _import_of(name: str, value: Any) -> str:
    """Return the import that gives an object of a module; "" where none does."""
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or module == _NOTEBOOK:
        return ""
    for own in (getattr(value, "__qualname__", ""), getattr(value, "_name", ""), name):
        first, _, inside = str(own or "").partition(".")
        there = getattr(sys.modules.get(module), first, None) if first else None
        for part in inside.split(".") if inside else ():
            there = getattr(there, part, None)
        if first and there is value:
            text = f"from {module} import {first}"
            return text if own == name else f"{text}\n{name} = {own}"
    return ""


def _write_dataclass(name: str, value: Any, found: dict[str, str]) -> None:
    """Add an instance as a call of its class, where that gives all of it again."""
    kind = type(value)
    fields = dataclasses.fields(value)
    mine = {field.name: getattr(value, field.name) for field in fields}
    if hasattr(kind, "__post_init__") or not all(field.init for field in fields):
        raise _NoCodeError(f"{name} is a {kind.__name__}, which computes a part of itself")
    if vars(value).keys() - mine.keys() or not all(map(plain.is_plain, mine.values())):
        raise _NoCodeError(f"{name} is a {kind.__name__}, which holds more than plain values")
    _write(kind.__name__, kind, found)
    given = ", ".join(f"{field}={literal(of)}" for field, of in mine.items())
    found[name] = f"{name} = {kind.__name__}({given})"


def _write_definition(name: str, value: Any, found: dict[str, str]) -> None:
    own_name = value.__qualname__
    if value.__module__ != _NOTEBOOK:
        raise _NoCodeError(f"{name} is made by {value.__module__}, inside of a function")
    source = _source_of_class(value) if isinstance(value, type) else inspect.getsource(value)
    source = textwrap.dedent(source).strip("\n")
    body = ast.parse(source).body
    if "<locals>" in own_name or "get_ipython" in source or len(body) != 1:
        raise _NoCodeError(f"{name} is made inside of a function, or by IPython's own syntax")
    found[name] = ""  # while what it stands on, which may be itself, is written above it
    for read, of in _read_by(value, source):
        if read not in found and read not in NAMES_OF_A_RANK:
            _write(read, of, found)
    given = getattr(body[0], "name", "") or _assigned(body[0])
    del found[name]  # it stands below what it reads
    renamed = [] if given == name else [f"{name} = {given}"]
    since = [*_as_made(name, value, body[0]), *_set_since(name, value, body[0], found)]
    found[name] = "\n".join([source, *renamed, *since])


def _set_since(name: str, value: Any, definition: ast.stmt, found: dict[str, str]) -> Iterator[str]:
    """Yield statements that set what a function or class was given after its definition."""
    written = {one for part in getattr(definition, "body", ()) for one in _given(part)}
    for attribute, of in vars(inspect.unwrap(value)).items():
        if attribute.startswith("__") or isinstance(value, EnumType):
            continue  # Python's own, or a library's
        is_patched = isinstance(of, types.FunctionType) and of.__qualname__ != (
            f"{value.__qualname__}.{attribute}"
        )
        if is_patched and of.__module__ == _NOTEBOOK and isinstance(value, type):
            _write(of.__name__, of, found)
            yield f"{name}.{attribute} = {of.__name__}"
        elif plain.is_plain(of) and (attribute not in written or not isinstance(value, type)):
            yield f"{name}.{attribute} = {literal(of)}"
        elif attribute not in written and not isinstance(value, type):
            raise _NoCodeError(f"{name}.{attribute} was set later, and is no plain value")


def _as_made(name: str, value: Any, definition: ast.stmt) -> Iterator[str]:
    """Yield statements that set what a definition has computed from values that changed since.

    Those are the defaults of functions, and what the body of a class assigns.
    """
    if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        function = inspect.unwrap(value)
        had, space = function.__defaults__ or (), function.__globals__
        texts = [
            literal(of) if _is_other(node, of, space) else f"{name}.__defaults__[{n}]"
            for n, (node, of) in enumerate(zip(definition.args.defaults, had, strict=True))
        ]
        if any("__defaults__" not in text for text in texts):
            yield f"{name}.__defaults__ = ({', '.join(texts)},)"
        keywords = zip(definition.args.kwonlyargs, definition.args.kw_defaults, strict=True)
        for parameter, node in keywords:
            if node is not None:
                of = function.__kwdefaults__[parameter.arg]
                if _is_other(node, of, space):
                    yield f"{name}.__kwdefaults__[{parameter.arg!r}] = {literal(of)}"
    elif isinstance(definition, ast.ClassDef):
        space = _globals_of_class(value)
        for one in definition.body:
            if isinstance(one, ast.FunctionDef) and isinstance(
                vars(value).get(one.name), types.FunctionType
            ):
                yield from _as_made(f"{name}.{one.name}", vars(value)[one.name], one)
            elif isinstance(one, ast.Assign | ast.AnnAssign) and one.value is not None:
                for attribute in _given(one):
                    if _is_other(one.value, vars(value).get(attribute), space):
                        yield f"{name}.{attribute} = {literal(vars(value)[attribute])}"


def _is_other(node: ast.expr, had: object, space: dict[str, Any]) -> bool:
    """Return whether an expression would no longer give a plain value that it gave.

    Calls are not made again: what they gave is taken for another.
    """
    if not plain.is_plain(had):
        return False
    if isinstance(node, ast.Constant):
        return literal(node.value) != literal(had)
    if any(isinstance(inner, ast.Call) for inner in ast.walk(node)):
        return True
    try:
        now = eval(ast.unparse(node), space)
    except Exception:  # a name of the class's own, or one that is gone
        return True
    return not plain.is_plain(now) or literal(now) != literal(had)


def _assigned(statement: ast.stmt) -> str:
    """Return the name to which a lambda was assigned."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    raise _NoCodeError("it is a lambda within another statement")


def _source_of_class(value: type) -> str:
    """Return a class's source by that of a method: Python looks in the file of `__main__`.

    One without a method of its own, such as a dataclass, is the newest of its name in any cell.
    """
    for one in vars(value).values():
        method = inspect.unwrap(getattr(one, "__func__", getattr(one, "fget", one)))
        if not isinstance(method, types.FunctionType):
            continue
        text = "".join(linecache.getlines(method.__code__.co_filename))
        for first, end in _places_of(value.__name__, text):
            if first <= method.__code__.co_firstlineno <= end:
                return "\n".join(text.split("\n")[first - 1 : end])
    for file in reversed([*linecache.cache]):
        text = "".join(linecache.getlines(file)) if _is_cells(file) else ""
        for first, end in _places_of(value.__name__, text):
            return "\n".join(text.split("\n")[first - 1 : end])
    raise _NoCodeError(f"{value.__name__} is a class whose source no cell has")


def _is_cells(file: str) -> bool:
    """Return whether a file that `linecache` knows is a cell's, as IPython calls it."""
    return file.startswith("<") or "ipykernel_" in file


def _places_of(name: str, text: str) -> Iterator[tuple[int, int]]:
    """Yield the first and the last line of each class of a name."""
    for node in (one for top in _parsed(text) for one in ast.walk(top)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            yield first, node.end_lineno or first


def _read_by(value: Any, source: str) -> Iterator[tuple[str, object]]:
    """Yield the notebook's globals that a definition reads, as they are now."""
    function = inspect.unwrap(value)
    notebook = getattr(function, "__globals__", None) or _globals_of_class(value)
    for name in sorted(_globals_read(source)):
        if name in notebook and getattr(builtins, name, None) is not notebook[name]:
            yield name, notebook[name]


def _globals_read(source: str) -> set[str]:
    """Return the names that code reads from outside of itself, also when it is called."""
    tables = [symtable.symtable(source, "sent", "exec")]
    names: set[str] = set()
    for table in tables:
        tables += table.get_children()
        is_top = table.get_type() == "module"
        names |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (is_top or symbol.is_global())
        }
    return names


def _globals_of_class(value: type) -> dict[str, Any]:
    for one in vars(value).values():
        method = inspect.unwrap(getattr(one, "__func__", getattr(one, "fget", one)))
        if isinstance(method, types.FunctionType) and method.__module__ == _NOTEBOOK:
            return method.__globals__
    return vars(sys.modules[_NOTEBOOK])


def written_down(name: str, before: Sequence[str], ranks: str = "all") -> Sent:
    """Return what a push sends where no kernel knows it: what cells above it write down.

    Args:
        name: What is pushed.
        before: Plain code of the notebook's own cells above.
        ranks: To which it goes.
    """
    statements: dict[str, ast.stmt] = {}
    for statement in (one for code in before for one in _parsed(code)):
        for given in _given(statement):
            statements[given] = statement
    found: dict[str, str] = {}
    try:
        _collect(name, statements, found)
    except _NoCodeError as error:
        return Sent(name, (), str(error), ranks)
    return Sent(name, tuple(found.items()), "", ranks)


def _parsed(code: str) -> list[ast.stmt]:
    try:
        return ast.parse(code).body
    except (SyntaxError, ValueError):
        return []


def _given(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [one.asname or one.name.partition(".")[0] for one in statement.names]
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    stored = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return [node.id for node in stored if isinstance(node.ctx, ast.Store)]


def _collect(name: str, statements: dict[str, ast.stmt], found: dict[str, str]) -> None:
    """Add the statement that gives `name`, below those of the names that it uses."""
    if name in found:
        return
    kernel = "the kernel knows its value: %dist export in the notebook"
    statement = statements.get(name)
    if statement is None:
        raise _NoCodeError(f"no cell writes {name} down; {kernel}")
    if not _stands_alone(statement):
        raise _NoCodeError(f"{name} is computed in the notebook; {kernel}")
    found[name] = ""
    source = ast.unparse(statement)
    for read in sorted(_globals_read(source) & statements.keys()):
        _collect(read, statements, found)
    del found[name]  # it stands below what it reads
    found[name] = source


def _stands_alone(statement: ast.stmt) -> bool:
    """Return whether a statement is an import, a definition, or gives a literal."""
    if isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef):
        return True
    value = getattr(statement, "value", None)
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or value is None:
        return False
    try:
        ast.literal_eval(value)
    except ValueError:
        return False
    return True
