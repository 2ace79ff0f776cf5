"""Pickle a whole namespace with one memo, and never fail because of one object in it.

One pickler for all names, so that what two names share they share afterwards as well: an optimizer
and its parameters, tied weights, views of one storage. Classes and functions made in cells travel
by value; such a function has the other rank's namespace as its globals, not a copy of ours.

What cannot be pickled becomes a `Placeholder`, wherever it stands:
- `dump` computes every reduction itself, and puts a placeholder where one raises;
- each object is built on the other side (`unpickler`), which reports what raises there.
  The caller dumps again with these objects refused, so no object is ever half built.
A recipe that raises LostState gives up the whole name: of a sharded model no part is worth having.

Based on cloudpickle (3.1: `Pickler.reducer_override`, `Pickler.dispatch_table`, both of them
documented by the standard library). Main thread only.
"""

import contextlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from nbdist.engine.kernel import placeholder
from nbdist.engine.kernel.placeholder import Placeholder, describe, first_line
from nbdist.engine.recovery.clone.unpickler import (
    UnpickleFailure,
    fill,
    fill_function,
    load,
    make,
    make_function,
)
from nbdist.shared.error_text import named, text_of

Recipe = Callable[[Any], tuple[Any, ...] | None]  # a reduction as of `__reduce__`; None: not mine

# The pickler has ways of its own for them.
_WITHOUT_REDUCTION = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(tuple, list, dict, set, frozenset),
)
_DEPTH = 10_000  # of nested objects; C frames of some hundred bytes each


class LostState(Exception):
    """The object's state died with its rank; whatever holds it cannot travel."""


@dataclass(slots=True)
class Parcel:
    """A pickled namespace: one stream for each name, and the buffers of all."""

    names: list[str]
    streams: list[bytes]
    buffers: list[memoryview]
    placeholders: dict[str, str]  # by name: what did not travel, and why
    lost: dict[str, str]  # by name: whose state died
    objects: list[Any]  # by serial number
    first_serial: list[int]  # of each name


def dump(
    namespace: Mapping[str, Any],
    anchors: Mapping[int, str],
    recipes: Sequence[Recipe],
    *,
    user_globals: dict[str, Any],
    refused: Mapping[int, str] | None = None,
    excluded: Mapping[str, str] | None = None,
) -> Parcel:
    """Return `namespace` pickled.

    Args:
        namespace: What travels, by name.
        anchors: By `id`, objects that the other side has itself, and their keys for `load`.
        recipes: Asked for each object, before its own way to be pickled.
        user_globals: The namespace that cells run in.
        refused: By `id`, objects that become placeholders, and why.
        excluded: Names that become placeholders, and why.
    """
    gone, lost = dict(excluded or {}), dict[str, str]()
    while True:
        pickler = _Pickler(anchors, recipes, user_globals, refused or {})
        parcel = _dump_all(pickler, namespace, gone, lost)
        if parcel is not None:
            return parcel


def _dump_all(
    pickler: "_Pickler", namespace: Mapping[str, Any], gone: dict[str, str], lost: dict[str, str]
) -> Parcel | None:
    """Pickle all names but those `gone`; None when one more of them had to go."""
    placeholders = dict[str, str]()
    streams, first_serial = [], []
    for name, value in namespace.items():
        first_serial.append(len(pickler.objects))
        pickler.placed.clear()
        try:
            with _deep_recursion():
                stream = pickler.one(
                    Placeholder(describe(value), gone[name]) if name in gone else value
                )
        except LostState as error:
            gone[name] = lost[name] = str(error)
            return None
        except Exception as error:
            # Past all that is caught an object at a time: the pickler itself has given up, and
            # its memo knows objects that are in no stream. Begin again without this name.
            gone[name] = named(error)
            return None
        streams.append(stream)
        if name in gone and name not in lost:
            placeholders[name] = f"{describe(value)}: {gone[name]}"
        elif pickler.placed and name not in lost:
            placeholders[name] = _say_placed(value, pickler.placed)
    return Parcel(
        list(namespace),
        streams,
        [part.raw() for part in pickler.parts],
        placeholders,
        lost,
        pickler.objects,
        first_serial,
    )


def _say_placed(value: Any, placed: list[tuple[Any, str]]) -> str:
    if placed[0][0] is value:
        return f"{describe(value)}: {placed[0][1]}"
    kinds = dict.fromkeys(describe(part) for part, _ in placed)
    return f"{describe(value)}, with placeholders for {', '.join(kinds)}: {placed[0][1]}"


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, with recipes, anchors, and placeholders for what cannot travel."""

    def __init__(
        self,
        anchors: Mapping[int, str],
        recipes: Sequence[Recipe],
        user_globals: dict[str, Any],
        refused: Mapping[int, str],
    ) -> None:
        self._stream = io.BytesIO()
        self.parts: list[pickle.PickleBuffer] = []
        super().__init__(self._stream, protocol=5, buffer_callback=self.parts.append)
        self.objects: list[Any] = []
        self.placed: list[tuple[Any, str]] = []
        self._anchors = dict(anchors)
        self._recipes = tuple(recipes)
        self._user_globals = user_globals
        self._refused = refused
        self._cells: dict[int, _Cell] = {}

    def one(self, value: Any) -> bytes:
        """Return the stream of one more value; it may refer to those before."""
        self._stream.seek(0)
        self._stream.truncate()
        self.dump(value)
        return self._stream.getvalue()

    def persistent_id(self, value: Any) -> str | None:
        """Return the key of what the other side has itself."""
        return self._anchors.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        """Return how `value` is made again; called for all but plain values and containers."""
        serial = len(self.objects)
        try:
            if id(value) in self._refused:
                raise pickle.PicklingError(self._refused[id(value)])
            reduction = self._reduce(value)
        except (LostState, RecursionError):
            raise
        except Exception as error:
            why = first_line(text_of(error) or type(error).__name__)
            self.placed.append((value, why))
            return Placeholder, (describe(value), why)
        if reduction is NotImplemented:
            return NotImplemented  # by its name
        if type(value) is Placeholder:
            self.placed.append((value, placeholder.why(value)))
        self.objects.append(value)
        function, args, state, items, pairs, set_state = (*reduction, *(None,) * 4)[:6]
        contents = None
        if state is not None or items is not None or pairs is not None:
            contents = (serial, state, set_state, _listed(items), _listed(pairs))
        return make, (serial, function, args), contents, None, None, fill

    def _reduce(self, value: Any) -> Any:
        for recipe in self._recipes:
            reduction = recipe(value)
            if reduction is not None:
                return reduction
        kind = type(value)
        if kind is types.FunctionType:
            return self._reduce_function(value)
        if kind is _Cell:
            return types.CellType, ()
        if issubclass(kind, type):
            return super().reducer_override(value)
        known = _OWN_WAYS.get(kind) or self.dispatch_table.get(kind)
        reduction = known(value) if known is not None else value.__reduce_ex__(5)
        if isinstance(reduction, str):
            return _by_name(value, reduction)
        if hasattr(kind, "__del__"):
            self._check_parts(reduction)
        return reduction

    def _check_parts(self, reduction: tuple[Any, ...]) -> None:
        """Raise what an object's attributes raise: with placeholders its `__del__` would fail."""
        state = reduction[2] if len(reduction) > 2 else None
        for part in state.values() if type(state) is dict else ():
            if type(part) is Placeholder:
                raise pickle.PicklingError(placeholder.why(part))
            if type(part) not in _WITHOUT_REDUCTION:
                self._reduce(part)

    def _reduce_function(self, function: types.FunctionType) -> Any:
        if function.__globals__ is self._user_globals:
            where = None
        else:
            reduction = super().reducer_override(function)
            if reduction is NotImplemented:
                return NotImplemented
            # Not `__module__`: `functools.wraps` copies that from the function that is wrapped.
            where = function.__globals__.get("__name__", "")
            home = sys.modules.get(where)
            if home is None or function.__globals__ is not vars(home):
                return reduction  # of a module that only this process has
        closure = function.__closure__
        # Functions that share a cell share it afterwards; what is in it may lead back to them.
        cells: Any = closure and tuple(self._cells.setdefault(id(c), _Cell(c)) for c in closure)
        contents = [_content_of(cell) for cell in closure or ()]
        state = (
            {name: getattr(function, name) for name in _FUNCTION_STATE},
            function.__dict__,
            contents,
        )
        args = (function.__code__, where, function.__name__, cells)
        return make_function, args, state, None, None, fill_function


@dataclass(slots=True, eq=False)
class _Cell:
    """Stands in the pickle for a closure's cell: an empty one, which its functions fill."""

    cell: types.CellType


def _content_of(cell: types.CellType) -> tuple[Any, ...]:
    """Return a cell's content in a tuple; an empty one for an empty cell."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _listed(items: Iterator[Any] | None) -> list[Any] | None:
    return None if items is None else list(items)


def _by_name(value: Any, name: str) -> Any:
    """Return NotImplemented, which makes the pickler use the name, after a look that it leads back.

    Raises:
        PicklingError: It leads nowhere, or to something else.
    """
    module = getattr(value, "__module__", None) or pickle.whichmodule(value, name)  # type: ignore[attr-defined]
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value:
        raise pickle.PicklingError(f"it is not found as {module}.{name}")
    return NotImplemented


def _refuse_file(value: Any) -> Any:
    raise pickle.PicklingError("an open file belongs to its process")


# cloudpickle would read a file to its end and send the text.
_OWN_WAYS: dict[type, Callable[[Any], Any]] = {io.TextIOWrapper: _refuse_file}

_FUNCTION_STATE = (
    *("__defaults__", "__kwdefaults__", "__annotations__", "__doc__"),
    *("__module__", "__qualname__"),
)


@contextlib.contextmanager
def _deep_recursion() -> Iterator[None]:
    """Let the pickler go deeper than Python code may: a chain of objects takes several frames."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _DEPTH))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def names_of(parcel: Parcel, failures: Sequence[UnpickleFailure]) -> dict[str, str]:
    """Return the names under which the failed objects were pickled, and why they failed."""
    found: dict[str, str] = {}
    ends = [*parcel.first_serial[1:], len(parcel.objects)]
    for name, first, end in zip(parcel.names, parcel.first_serial, ends, strict=True):
        for failure in failures:
            if first <= failure.serial < end:
                found.setdefault(name, failure.why)
    return found


def check() -> list[str]:
    """Return what this Python or cloudpickle lacks of what we use; empty when all is there."""
    broken = [
        f"cloudpickle.Pickler.{name} is gone"
        for name in ("reducer_override", "dispatch_table")
        if not hasattr(cloudpickle.Pickler, name)
    ]
    try:
        shared = [1]
        parcel = dump({"a": shared, "b": shared}, {}, (), user_globals={})
        values = load(parcel.names, parcel.streams, parcel.buffers, {}, {}).values
        if values["a"] is not values["b"]:
            broken.append("pickle keeps no memo from one dump to the next")
    except Exception as error:
        broken.append(f"a namespace cannot be pickled: {error}")
    return broken
