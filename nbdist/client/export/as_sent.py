"""What the kernel has of a function or class when it is sent, for a script takes it from a cell.

The cell that defines it may say something else by then: a cell that failed has defined it anew, or
`exec` and `%run` have. Text tells: for each name that it stands on a statement, that of its true
source or `NAME = LITERAL`, and for `CLASS.NAME` the same. What is not there is not known.
"""

import ast
import inspect
import linecache
import logging
import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from nbdist import plain
from nbdist.client.export.code import literal

log = logging.getLogger(__name__)

_MOST = 200  # functions and classes that are looked at
_NOTEBOOK = "__main__"
_EXEC = "<string>"  # the file of what `exec` has defined

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def known_of(name: str, value: object) -> dict[str, str]:
    """Return what is known of a function or class of the notebook's, which is sent now."""
    try:
        return _known_of(name, value)
    except Exception as error:  # sources come from wherever: not to know is no fault
        log.info("The source of %s is not known: %s", name, error)
        return {}


def _known_of(name: str, value: object) -> dict[str, str]:
    known: dict[str, str] = {}
    seen: set[tuple[str, int]] = set()
    waiting = [(name, value)]
    for one, of in waiting:
        if plain.is_plain(of):
            text = _assigned(one, of)
            # As a default it may have been another value than it is now: no one statement fits.
            known[one] = text if known.get(one, text) == text else f"{one} = ..."
        elif _is_notebooks(of) and (one, id(of)) not in seen and len(seen) < _MOST:
            seen.add((one, id(of)))
            waiting += _read_by(of)
            source = _source(of)
            definition = _definition(source)
            # One of another name may be what a decorator has made of it.
            is_its_own = "<locals>" not in of.__qualname__
            if _is_of_exec(of) and is_its_own:
                known[one] = "..."  # nor does a cell
            elif definition is not None and (definition.name == one or is_its_own):
                known[one] = source
                waiting += _defaults(definition, of)
            if isinstance(of, type) and of.__name__ == one:
                known |= _attributes(one, of)
    return {one: text for one, text in known.items() if text}


def _is_notebooks(value: object) -> TypeGuard[types.FunctionType | type]:
    is_defined = isinstance(value, types.FunctionType | type)
    return is_defined and getattr(value, "__module__", "") == _NOTEBOOK


def _is_of_exec(value: types.FunctionType | type) -> bool:
    function = inspect.unwrap(value)
    return isinstance(function, types.FunctionType) and function.__code__.co_filename == _EXEC


def _assigned(name: str, value: object) -> str:
    try:
        return f"{name} = {literal(value)}"
    except ValueError:  # a number of too many digits
        return ""


def _source(value: Any) -> str:
    try:
        source = _source_of_class(value) if isinstance(value, type) else inspect.getsource(value)
    except (OSError, TypeError, SyntaxError):
        return ""
    # What IPython alone understands stands in a cell in another form.
    return "" if "get_ipython" in source else textwrap.dedent(source)


def _source_of_class(value: type) -> str:
    """Return a class's source by that of a method: Python looks in the file of `__main__`."""
    for method in _methods(value):
        code = method.__code__
        text = "".join(linecache.getlines(code.co_filename))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                assert node.end_lineno is not None
                if first <= code.co_firstlineno <= node.end_lineno:
                    return "\n".join(text.split("\n")[first - 1 : node.end_lineno])
    return ""


def _methods(value: type) -> Iterator[types.FunctionType]:
    """Yield the functions in a class's body, without those that others have made or put there."""
    for one in vars(value).values():
        inside = getattr(one, "__func__", getattr(one, "fget", one))
        is_function = isinstance(inside, types.FunctionType) and _is_notebooks(inside)
        if is_function and not _is_of_exec(inside):  # as those of a dataclass are
            yield inside


def _read_by(value: Any) -> Iterator[tuple[str, object]]:
    """Yield the globals that a function, or the methods of a class, may read."""
    if isinstance(value, type):
        yield from ((base.__name__, base) for base in value.__bases__)
        for method in _methods(value):
            yield from _read_by(method)
        return
    function = inspect.unwrap(value)
    codes = [function.__code__]
    for code in codes:
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        for name in code.co_names:
            if name in function.__globals__:
                yield name, function.__globals__[name]


def _defaults(definition: _Definition, value: Any) -> Iterator[tuple[str, object]]:
    """Yield what the names that stand as defaults were when the function was made."""
    function = None if isinstance(value, type) else inspect.unwrap(value)
    if function is None or isinstance(definition, ast.ClassDef):
        return
    texts = definition.args.defaults
    for text, default in zip(texts, function.__defaults__ or (), strict=False):
        if isinstance(text, ast.Name):
            yield text.id, default


def _attributes(name: str, value: type) -> dict[str, str]:
    return {
        f"{name}.{attribute}": _assigned(attribute, of)
        for attribute, of in vars(value).items()
        if plain.is_plain(of)
    }


def is_as_sent(name: str, statement: ast.stmt, known: Mapping[str, str]) -> bool:
    """Return whether a cell's statement gives what was sent, as far as that is known. Pure."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return True
    if not isinstance(statement, _Definition):
        mine = dict(_values(statement)).get(name, "")
        return not mine or name not in known or mine == _sent_literal(known[name])
    if name in known and ast.dump(ast.parse(known[name]).body[0]) != ast.dump(statement):
        return False
    inside = statement.body if isinstance(statement, ast.ClassDef) else []
    given = {f"{name}.{one}": text for node in inside for one, text in _values(node)}
    return all(text == _sent_literal(known[one]) for one, text in given.items() if one in known)


def _sent_literal(text: str) -> str:
    """Return `3` of `name = 3`; "" of a definition."""
    name, _, value = text.partition(" = ")
    return value if name.isidentifier() else ""


def _values(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield the names to which a statement assigns literals, and these in one notation."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return
    value = statement.value
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    for target in targets:
        pairs: list[tuple[ast.expr, ast.expr]] = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=False))
        for one, of in pairs:
            if isinstance(one, ast.Name) and (text := _literal(of)):
                yield one.id, text


def _literal(value: ast.expr) -> str:
    try:
        return literal(ast.literal_eval(value))
    except ValueError:
        return ""


def _definition(source: str) -> _Definition | None:
    try:
        body = ast.parse(source).body
    except SyntaxError:  # a lambda's is the lines that it stands on
        return None
    return body[0] if len(body) == 1 and isinstance(body[0], _Definition) else None
