"""The border of what users call: arguments that a public function cannot take are refused there.

The annotations decide, so that no function lists its own checks: plain types (int, float, str,
bool, None, lists and dicts of these, paths, functions) and classes. Which values make sense, a
range or a word of several, is said by the function itself. Numbers of other libraries count as
numbers, for they say so by `__index__` and `__float__`.

A function of the engine is for ranks: it is refused in the notebook's kernel as well. Any thread.
"""

import functools
import inspect
import os
import reprlib
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from nbdist.errors import UsageError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)

_LINE = 100  # characters of a signature
_TOLD_WHOLE = (str, int, float, list, tuple, dict, type(None))

# What a type is called, one of it and several, and what passes for it.
_PLAIN: dict[Any, tuple[str, str, Callable[[Any], bool]]] = {
    int: ("a whole number", "whole numbers", lambda value: hasattr(type(value), "__index__")),
    float: (
        "a number",
        "numbers",
        lambda value: hasattr(type(value), "__float__") or hasattr(type(value), "__index__"),
    ),
    bool: (
        "True or False",
        "True or False",
        lambda value: value is not None and hasattr(type(value), "__bool__"),
    ),
    str: ("a text", "texts", lambda value: isinstance(value, str)),
    type(None): ("None", "None", lambda value: value is None),
    os.PathLike: ("a path", "paths", lambda value: isinstance(value, os.PathLike)),
    Callable: ("a function", "functions", callable),
    Sequence: (
        "a list",
        "lists",
        lambda value: (
            hasattr(value, "__len__")
            and hasattr(value, "__iter__")
            and not isinstance(value, str | bytes | Mapping)
        ),
    ),
    Mapping: ("a dict", "dicts", lambda value: isinstance(value, Mapping)),
    dict: ("a dict", "dicts", lambda value: isinstance(value, dict)),
}


def _no_session() -> bool:
    """Say that no session runs here, until the client has one."""
    return False


_has_session: Callable[[], bool] = _no_session


def know_session(has_session: Callable[[], bool]) -> None:
    """Let `has_session` say whether this process has a session: then it is no rank."""
    global _has_session
    _has_session = has_session


def checked(function: _Function) -> _Function:
    """Let a public function refuse, in one UsageError, what its signature cannot take.

    What makes a coroutine or a generator is returned as it is: nothing runs when that is called.
    """
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        return function
    owner, _, name = function.__qualname__.rpartition(".")
    call = f"{owner.lower() or 'nbdist'}.{name}"
    is_for_ranks = function.__module__.startswith("nbdist.engine.")

    @functools.cache  # when it is first called: an import pays nothing for it
    def signature() -> inspect.Signature:
        return inspect.signature(function)

    @functools.wraps(function)
    def refuse_or_call(*args: Any, **kwargs: Any) -> Any:
        if is_for_ranks and not _has_group() and _is_notebook():
            raise no_rank(call)
        try:
            bound = signature().bind(*args, **kwargs)
        except TypeError as error:
            raise _wrong_call(call, signature(), kwargs, error) from None
        for name, value in bound.arguments.items():
            _check(call, signature().parameters[name], value)
        return function(*args, **kwargs)

    return typing.cast(_Function, refuse_or_call)


def checked_methods(cls: _Class) -> _Class:
    """Let all public methods of a class be `checked`."""
    for name, value in list(vars(cls).items()):
        if inspect.isfunction(value) and not name.startswith("_"):
            setattr(cls, name, checked(value))
    return cls


def no_rank(call: str) -> UsageError:
    """Return what is said of a call for ranks in a process that is none, as the notebook's."""
    return UsageError(
        f"{call} is for ranks, and this process is none.",
        do="call it in a %%distributed cell, on all ranks",
    )


def refuse_unknown(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a keyword that would be passed on to a function that does not have it.

    Args:
        call: What was called, such as `nbdist.loader`.
        given: The keywords.
        known: Those that there are.

    Raises:
        UsageError: There is no such keyword.
    """
    names = list(known)
    for name in given:
        if name not in names:
            raise UsageError(f"{call} has no {name}.", do=_instead(name, names))


def _is_notebook() -> bool:
    """Return whether this process has a session, or is a kernel that has loaded nbdist."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return _has_session() or (shell is not None and "nbdist" in shell.extension_manager.loaded)


def _has_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_initialized()


def _wrong_call(
    call: str, signature: inspect.Signature, kwargs: Mapping[str, Any], error: TypeError
) -> UsageError:
    shown = signature.replace(
        parameters=[
            one.replace(annotation=inspect.Parameter.empty)
            for one in signature.parameters.values()
            if one.name != "self"
        ],
        return_annotation=inspect.Signature.empty,
    )
    lines = textwrap.fill(f"{call}{shown}", _LINE, subsequent_indent=" " * 9)
    named = [name for name in signature.parameters if name != "self"]
    instead = [_instead(name, named) for name in kwargs if name not in named]
    return UsageError(
        f"{call} cannot be called so: {error}.", why="; ".join(filter(None, instead)), do=lines
    )


def _instead(name: str, names: Sequence[str]) -> str:
    near = get_close_matches(name, names, n=1)
    return f"{near[0]}= in place of {name}=" if near else ""


def _check(call: str, parameter: inspect.Parameter, value: Any) -> None:
    annotation = parameter.annotation
    if parameter.kind is parameter.VAR_POSITIONAL:
        each = [(parameter.name, one) for one in value]
    elif parameter.kind is parameter.VAR_KEYWORD:
        each = list(value.items())
    else:
        each = [(parameter.name, value)]
    for name, one in each:
        if not _fits(one, annotation):
            raise UsageError(
                f"{call} takes {_named(annotation)} as {name}, not {_told(one)}.",
                do=f"help({call}) says what it takes",
            )


def _fits(value: Any, annotation: Any) -> bool:
    if _is_union(annotation):
        return any(_fits(value, one) for one in typing.get_args(annotation))
    # A text is a name that is there for type checkers alone.
    if annotation in (Any, inspect.Parameter.empty) or isinstance(annotation, str):
        return True
    kind, inside = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if kind not in _PLAIN:
        return not isinstance(kind, type) or isinstance(value, kind)
    if not _PLAIN[kind][2](value):
        return False
    if kind is Sequence and inside and inside[0] is not Any:
        return all(_fits(one, inside[0]) for one in value)
    if kind in (Mapping, dict) and inside:
        return all(_fits(k, inside[0]) and _fits(v, inside[1]) for k, v in value.items())
    return True


def _is_union(annotation: Any) -> bool:
    return isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union


def _named(annotation: Any) -> str:
    if _is_union(annotation):
        names = [_named(one) for one in typing.get_args(annotation)]
        return f"{', '.join(names[:-1])} or {names[-1]}"
    kind, inside = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if kind not in _PLAIN:
        return f"a {kind.__name__}"
    held = typing.get_origin(inside[-1]) or inside[-1] if kind is not Callable and inside else None
    several = f" of {_PLAIN[held][1]}" if held in _PLAIN and kind is not os.PathLike else ""
    return _PLAIN[kind][0] + several


def _told(value: Any) -> str:
    return reprlib.repr(value) if isinstance(value, _TOLD_WHOLE) else f"a {type(value).__name__}"
