"""Look up names on this rank, for Tab and Shift+Tab, without running code.

On the control thread, at any moment, also while a cell runs. Only dictionaries are read: no
property, `__getattr__`, `__dir__` or `__repr__` of the user's runs, and no collective with it. Of
a module its own `__dir__` is asked for the names, as it may import them when they are first used.
"""

import builtins
import functools
import inspect
import sys
import types
from collections.abc import Mapping
from typing import Any

_MOST_NAMES = 5000
_MOST_CHARS = 8000  # of a description
_MOST_CHARS_OF_VALUE = 200
_MODULE_DICTS = ("_parameters", "_buffers", "_modules")  # where torch.nn.Module keeps attributes
_COMPUTED = (property, functools.cached_property, types.GetSetDescriptorType)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_ROUTINES = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)
_MISSING = object()
_NOT_IMPORTED = property()  # what a module fetches when it is first used is computed, too


def members(path: str) -> dict[str, str]:
    """Return the names after `path.` with their kinds; after "", the names of cells.

    Args:
        path: Names with dots between; an unknown one has no members.
    """
    return members_of(path, _namespace())


def describe(path: str) -> str:
    """Return signature, type, value and docstring of `path`; "" when it is not known."""
    return describe_in(path, _namespace())


def _namespace() -> dict[str, Any]:
    from nbdist.engine.rank.rank import this_rank

    names: dict[str, Any] = this_rank().kernel.shell.user_ns
    return names


def members_of(path: str, namespace: Mapping[str, Any]) -> dict[str, str]:
    """Return `members(path)` in a namespace."""
    if path:
        value = _find(path, namespace)
        if value is _MISSING or isinstance(value, _COMPUTED):
            return {}
        found = _attributes(value)
    else:
        found = dict(namespace)
    return {name: _kind(found[name]) for name in list(found)[:_MOST_NAMES]}


def describe_in(path: str, namespace: Mapping[str, Any]) -> str:
    """Return `describe(path)` in a namespace."""
    value = _find(path, namespace)
    if value is _MISSING:
        return ""
    kind = type(value)
    lines = [
        ("Signature", _signature(path, value)),
        ("Type", f"{kind.__qualname__}, on rank 0"),
        ("Value", _value(value)),
        ("Docstring", _docstring(value)),
    ]
    text = "\n".join(f"{title + ':':<11}{said}" for title, said in lines if said)
    return text[:_MOST_CHARS]


def _find(path: str, namespace: Mapping[str, Any]) -> Any:
    first, *rest = path.split(".")
    value = namespace.get(first, getattr(builtins, first, _MISSING))
    for name in rest:
        if value is _MISSING or isinstance(value, _COMPUTED):
            return _MISSING
        value = _attribute(value, name)
    return value


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute without running code; of a computed one, its descriptor."""
    found = inspect.getattr_static(value, name, _MISSING)
    if found is _MISSING:
        return _module_attributes(value).get(name, _MISSING)
    if isinstance(found, types.MemberDescriptorType) and not isinstance(value, type):
        try:
            return found.__get__(value, type(value))  # a slot
        except AttributeError:
            return _MISSING
    if isinstance(found, staticmethod):
        return found.__func__
    if isinstance(found, classmethod):
        owner = value if isinstance(value, type) else type(value)
        return types.MethodType(found.__func__, owner)
    is_method = isinstance(found, types.FunctionType) and name not in _own(value)
    if is_method and not isinstance(value, type):
        return types.MethodType(found, value)
    return found


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of a value and of its class as they are stored."""
    if isinstance(value, types.ModuleType):  # whose class has nothing to look up
        return {name: _own(value).get(name, _NOT_IMPORTED) for name in dir(value)}
    found: dict[str, Any] = {}
    owner = value if isinstance(value, type) else type(value)
    for base in reversed(type.__getattribute__(owner, "__mro__")):
        found |= type.__getattribute__(base, "__dict__")
    return found | _own(value) | _module_attributes(value)


def _own(value: Any) -> dict[str, Any]:
    try:
        return dict(object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError):  # it has slots, or is built in
        return {}


def _module_attributes(value: Any) -> dict[str, Any]:
    """Return parameters, buffers and submodules of a `torch.nn.Module`."""
    own = _own(value)
    found: dict[str, Any] = {}
    for name in _MODULE_DICTS:
        if isinstance(own.get(name), dict):
            found |= own[name]
    return found


def _kind(value: Any) -> str:
    """Return one of the kinds for which front ends have icons."""
    if isinstance(value, types.ModuleType):
        return "module"
    if isinstance(value, type):
        return "class"
    if isinstance(value, (*_ROUTINES, staticmethod, classmethod)):
        return "function"
    return "property" if isinstance(value, _COMPUTED) else "instance"


def _signature(path: str, value: Any) -> str:
    routine = value
    if not isinstance(value, (*_ROUTINES, type)):
        routine = inspect.getattr_static(type(value), "forward", _MISSING)
        if not isinstance(routine, types.FunctionType):
            return ""
        routine = types.MethodType(routine, value)
    try:
        return f"{path}{inspect.signature(routine)}"
    except (TypeError, ValueError):  # some that are built in have none
        return ""


def _value(value: Any) -> str:
    torch = sys.modules.get("torch")
    if type(value) in _PLAIN:
        return repr(value[:_MOST_CHARS_OF_VALUE] if isinstance(value, (str, bytes)) else value)
    if type(value) in (list, tuple, dict, set):
        return f"{len(value)} items"
    # Only of these two: a subclass may run code for its shape.
    if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
        return f"{tuple(value.shape)}, {value.dtype}, {value.device}"
    return ""


def _docstring(value: Any) -> str:
    has_own = isinstance(value, (*_ROUTINES, *_COMPUTED, type, types.ModuleType))
    if not has_own and type(value) in (*_PLAIN, list, tuple, dict, set):
        return ""  # everyone knows them
    text = inspect.getdoc(value if has_own else type(value)) or ""
    return f"\n{text}" if "\n" in text else text
