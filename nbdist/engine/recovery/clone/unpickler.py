"""Build what `pickler` has pickled, and note each object that cannot be built.

Pickles name the functions here (`make`, `fill`, ...): they run while `load` reads, on the other
side. Main thread only.
"""

import contextlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbdist.engine.compat import torch_hooks
from nbdist.engine.kernel.placeholder import Placeholder, PlaceholderError, first_line
from nbdist.shared.error_text import named
from nbdist.shared.errors import LostStateError


@dataclass(slots=True)
class UnpickleFailure:
    """An object that could not be built: its serial number in the parcel, and why."""

    serial: int
    why: str


@dataclass(slots=True)
class Loaded:
    """What a parcel has brought. With failures the values are not to be used."""

    values: dict[str, Any]
    failures: list[UnpickleFailure]
    missing: dict[str, str]  # by name: what it needs of this process, and this process has not
    broken: dict[str, str]  # the name at which reading has ended, and why

    @property
    def is_whole(self) -> bool:
        """Whether all could be built."""
        return not self.failures and not self.broken


@dataclass(slots=True)
class _Loading:
    """What the functions below need to know of the `load` that calls them."""

    user_globals: dict[str, Any]
    failures: list[UnpickleFailure] = field(default_factory=list)
    later: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)  # order, serial
    serial: int = -1  # of the object that is being filled


_NOT_HERE = "this process has none"


class _Loads:
    """The `load` under way, of which functions that pickles name need to know."""

    def __init__(self) -> None:
        self._loading: _Loading | None = None

    @contextlib.contextmanager
    def began(self, user_globals: dict[str, Any]) -> Iterator[_Loading]:
        """Be within a `load`, one at a time."""
        self._loading = now = _Loading(user_globals)
        try:
            yield now
        finally:
            self._loading = None

    def now(self) -> _Loading:
        """Return the one under way."""
        assert self._loading is not None, "only `load` calls these functions"
        return self._loading


def load(
    names: Sequence[str],
    streams: Sequence[bytes],
    buffers: Sequence[Any],
    anchors: Mapping[str, Any],
    user_globals: dict[str, Any],
) -> Loaded:
    """Return the names and values of a parcel, and what could not be built.

    After failures dump again, with those objects refused, and without names that are broken: an
    object whose hash follows from its state, say, in a set that leads back to it.

    Args:
        names: The parcel's.
        streams: The parcel's.
        buffers: The parcel's; arrays and tensors keep them as their memory, so writable ones.
        anchors: By the key given to `dump`, what this side has itself.
        user_globals: The globals of functions that were made in cells.
    """
    with here.began(user_globals) as loading:
        unpickler = _Unpickler(streams, buffers, anchors)
        values, missing = {}, dict[str, str]()
        for name in names:
            try:
                values[name] = unpickler.load()
            except Exception as error:  # of the user's class; what follows it cannot be read
                return Loaded({}, loading.failures, missing, {name: first_line(named(error))})
            if unpickler.missing:
                missing[name] = f"{', '.join(unpickler.missing)}: {_NOT_HERE}"
                unpickler.missing.clear()
        for _, serial, finish in sorted(loading.later, key=lambda entry: entry[0]):
            with _noted(serial):
                finish()
    return Loaded(values, loading.failures, missing, {})


def afterwards(finish: Callable[[], None], order: int = 0) -> None:
    """Have `finish` called when all names are loaded, by rising order. For setters of recipes."""
    loading = here.now()
    loading.later.append((order, loading.serial, finish))


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
            if name.endswith(".step"):  # as schedulers hold it, around which they wrap their own
                torch_hooks.let_run_hooks(super().find_class(module, name.removesuffix(".step")))
            return super().find_class(module, name)
        except Exception as error:
            return Placeholder(f"{module}.{name}", named(error))


@contextlib.contextmanager
def _noted(serial: int) -> Iterator[None]:
    """Note what raises, as a failure of this object."""
    try:
        yield
    except Exception as error:
        why = error.why if isinstance(error, PlaceholderError | LostStateError) else ""
        why = why or first_line(named(error))
        here.now().failures.append(UnpickleFailure(serial, why))


def make(serial: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return a new object, yet without its contents; a placeholder where that raises."""
    here.now().serial = serial
    with _noted(serial):
        try:
            return function(*args)
        except Exception as error:
            for part in (function, *args):
                if type(part) is Placeholder:
                    raise PlaceholderError("It is made with one.", why=repr(part)) from error
            raise
    return Placeholder("object", "it could not be built")


def fill(value: Any, contents: tuple[Any, ...]) -> None:
    """Give an object its state, as pickle does it after making it."""
    serial, state, set_state, items, pairs = contents
    if type(value) is Placeholder:
        return
    here.now().serial = serial
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


def make_function(
    code: types.CodeType, module: str | None, name: str, cells: tuple[Any, ...] | None
) -> types.FunctionType:
    """Return a new function; `module` None stands for the namespace that cells run in."""
    if module is None:
        globals_ = here.now().user_globals
    else:
        __import__(module)
        globals_ = vars(sys.modules[module])
    return types.FunctionType(code, globals_, name, None, cells)


def fill_function(function: types.FunctionType, state: tuple[Any, ...]) -> None:
    """Give a function its attributes, and its closure's cells their contents."""
    attributes, own, contents = state
    for name, value in attributes.items():
        setattr(function, name, value)
    vars(function).update(own)
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        if content:
            cell.cell_contents = content[0]


here = _Loads()
