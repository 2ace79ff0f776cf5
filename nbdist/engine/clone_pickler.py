"""Pickle a whole namespace with one memo, and never fail because of one object in it.

One pickler for all names, so that what two names share they share afterwards as well: an optimizer
and its parameters, tied weights, views of one storage. Classes and functions made in cells travel
by value; such a function has the other rank's namespace as its globals, not a copy of ours.

What cannot be pickled becomes a `Placeholder`, wherever it stands:
- `dump` computes every reduction itself, and puts a placeholder where one raises;
- each object is built on the other side by `_make` and `_fill`, which report what raises there.
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
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from nbdist.engine.placeholder import Placeholder, PlaceholderError, describe

Recipe = Callable[[Any], tuple[Any, ...] | None]  # a reduction as of `__reduce__`; None: not mine

_LONGEST_WHY = 200  # characters
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


@dataclass(slots=True)
class Failure:
    """An object that could not be built: its serial number in the parcel, and why."""

    serial: int
    why: str


@dataclass(slots=True)
class Loaded:
    """What a parcel has brought. With failures the values are not to be used."""

    values: dict[str, Any]
    failures: list[Failure]
    missing: dict[str, str]  # by name: what it needs of this process, and this process has not


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
            gone[name] = f"{type(error).__name__}: {error}"
            return None
        streams.append(stream)
        if name in gone and name not in lost:
            placeholders[name] = f"{describe(value)}: {gone[name]}"
        elif pickler.placed:
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
            why = _first_line(str(error) or type(error).__name__)
            self.placed.append((value, why))
            return Placeholder, (describe(value), why)
        if reduction is NotImplemented:
            return NotImplemented  # by its name
        self.objects.append(value)
        function, args, state, items, pairs, set_state = (*reduction, *(None,) * 4)[:6]
        contents = None
        if state is not None or items is not None or pairs is not None:
            contents = (serial, state, set_state, _listed(items), _listed(pairs))
        return _make, (serial, function, args), contents, None, None, _fill

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
        return reduction

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
        return _make_function, args, state, None, None, _fill_function


@dataclass(slots=True, eq=False)
class _Cell:
    """Stands in the pickle for a closure's cell: an empty one, which its functions fill."""

    cell: types.CellType


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


# ---- The other side --------------------------------------------------------------------------


@dataclass(slots=True)
class _Loading:
    """What the functions below need to know of the `load` that calls them."""

    user_globals: dict[str, Any]
    failures: list[Failure] = field(default_factory=list)
    later: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)  # order, serial
    serial: int = -1  # of the object that is being filled


_loading: _Loading | None = None
_NOT_HERE = "this process has none"


def load(
    names: Sequence[str],
    streams: Sequence[bytes],
    buffers: Sequence[Any],
    anchors: Mapping[str, Any],
    user_globals: dict[str, Any],
) -> Loaded:
    """Return the names and values of a parcel, and what could not be built.

    After failures dump again, with those objects refused.

    Args:
        names: The parcel's.
        streams: The parcel's.
        buffers: The parcel's; arrays and tensors keep them as their memory, so writable ones.
        anchors: By the key given to `dump`, what this side has itself.
        user_globals: The globals of functions that were made in cells.
    """
    global _loading
    _loading = here = _Loading(user_globals)
    try:
        unpickler = _Unpickler(streams, buffers, anchors)
        values, missing = {}, dict[str, str]()
        for name in names:
            values[name] = unpickler.load()
            if unpickler.missing:
                missing[name] = f"{', '.join(unpickler.missing)}: {_NOT_HERE}"
                unpickler.missing.clear()
        for _, serial, finish in sorted(here.later, key=lambda entry: entry[0]):
            with _noted(serial):
                finish()
    finally:
        _loading = None
    return Loaded(values, here.failures, missing)


def afterwards(finish: Callable[[], None], order: int = 0) -> None:
    """Have `finish` called when all names are loaded, by rising order. For setters of recipes."""
    here = _now()
    here.later.append((order, here.serial, finish))


class _Unpickler(pickle.Unpickler):
    """Reads all streams with one memo; a name that leads nowhere becomes a placeholder."""

    def __init__(
        self, streams: Sequence[bytes], buffers: Sequence[Any], anchors: Mapping[str, Any]
    ) -> None:
        super().__init__(io.BytesIO(b"".join(streams)), buffers=buffers)
        self._anchors = anchors
        self.missing: list[str] = []

    def persistent_load(self, key: Any) -> Any:
        """Return what this side has itself, or a placeholder if it has not."""
        if key in self._anchors:
            return self._anchors[key]
        self.missing.append(key)
        return Placeholder(key, _NOT_HERE)

    def find_class(self, module: str, name: str) -> Any:
        """Return an attribute of a module, which is imported."""
        try:
            return super().find_class(module, name)
        except Exception as error:
            return Placeholder(f"{module}.{name}", f"{type(error).__name__}: {error}")


def _now() -> _Loading:
    assert _loading is not None, "only `load` calls these functions"
    return _loading


@contextlib.contextmanager
def _noted(serial: int) -> Iterator[None]:
    """Note what raises, as a failure of this object."""
    try:
        yield
    except Exception as error:
        why = error.why if isinstance(error, PlaceholderError) else ""
        why = why or _first_line(f"{type(error).__name__}: {error}")
        _now().failures.append(Failure(serial, why))


def _first_line(text: str) -> str:
    """Return what a list of many placeholders has room for: some errors print whole tensors."""
    line = text.split("\n", 1)[0]
    return line if len(line) <= _LONGEST_WHY else line[:_LONGEST_WHY] + "…"


def _make(serial: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _now().serial = serial
    with _noted(serial):
        try:
            return function(*args)
        except Exception as error:
            for part in (function, *args):
                if type(part) is Placeholder:
                    raise PlaceholderError("It is made with one.", why=repr(part)) from error
            raise
    return Placeholder("object", "it could not be built")


def _fill(value: Any, contents: tuple[Any, ...]) -> None:
    """Give an object its state, as pickle does it after making it."""
    serial, state, set_state, items, pairs = contents
    if type(value) is Placeholder:
        return
    _now().serial = serial
    with _noted(serial):
        if items:
            extend = getattr(value, "extend", None)
            if extend is not None:
                extend(items)
            else:
                for item in items:
                    value.append(item)
        for key, entry in pairs or ():
            value[key] = entry
        if state is None:
            return
        if set_state is not None:
            set_state(value, state)
        elif hasattr(value, "__setstate__"):
            value.__setstate__(state)
        else:
            _update(value, state)


def _update(value: Any, state: Any) -> None:
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        vars(value).update(state)
    for name, entry in (slots or {}).items():
        setattr(value, name, entry)


def _make_function(
    code: types.CodeType, module: str | None, name: str, cells: tuple[Any, ...] | None
) -> types.FunctionType:
    if module is None:
        globals_ = _now().user_globals
    else:
        __import__(module)
        globals_ = vars(sys.modules[module])
    return types.FunctionType(code, globals_, name, None, cells)


def _fill_function(function: types.FunctionType, state: tuple[Any, ...]) -> None:
    attributes, own, contents = state
    for name, value in attributes.items():
        setattr(function, name, value)
    vars(function).update(own)
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        if content:
            cell.cell_contents = content[0]


def _content_of(cell: types.CellType) -> tuple[Any, ...]:
    """Return a cell's content in a tuple; an empty one for an empty cell."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


@contextlib.contextmanager
def _deep_recursion() -> Iterator[None]:
    """Let the pickler go deeper than Python code may: a chain of objects takes several frames."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _DEPTH))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def names_of(parcel: Parcel, failures: Sequence[Failure]) -> dict[str, str]:
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
