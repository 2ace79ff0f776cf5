"""Placeholders in a replacement rank's namespace for objects that could not be copied.

Standard library only. A placeholder only names the missing object: to use it raises a
PlaceholderError, or a LostStateError where it was a model; names with an underscore are not there.
IPython may show it, and it may be pickled, copied and compared by identity.
"""

from typing import Any, NoReturn

from nbdist.shared.errors import LostStateError, NBDistError, TransferError

_LONGEST_WHY = 200  # characters


class PlaceholderError(TransferError):
    """A placeholder was used as if it were the missing object."""


class Placeholder:
    """Replaces an object of type `what`, which was not copied because of `why`.

    With `is_state` the object is a model: created again, it would be untrained.
    """

    __slots__ = ("_is_state", "_what", "_why")

    def __init__(self, what: str, why: str, is_state: bool = False) -> None:
        object.__setattr__(self, "_what", what)
        object.__setattr__(self, "_why", why)
        object.__setattr__(self, "_is_state", is_state)

    def __repr__(self) -> str:
        return f"<placeholder for {self._what}: {self._why}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Placeholder, (self._what, self._why, self._is_state)

    def __getattr__(self, name: str) -> NoReturn:
        # Python, IPython and torch look up such names on any object; it has none of them.
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()

    def __setattr__(self, name: str, value: object) -> None:
        self._refuse()

    def _refuse(self, *_args: object, **_kwargs: object) -> NoReturn:
        error: type[NBDistError] = LostStateError if self._is_state else PlaceholderError
        raise error(
            f"This is a placeholder for {self._what}, which was not cloned to this rank.",
            why=self._why,
            do="create it again in a cell",
        )


def describe(value: object) -> str:
    """Return the name of a value's type as users know it: `threading.Lock`, `open file`."""
    kind = type(value)
    if isinstance(value, Placeholder):
        return str(value._what)
    if kind.__bases__[:1] and kind.__bases__[0].__name__ == "FSDPModule":
        kind = kind.__bases__[-1]  # the user's class: torch makes a subclass of each that it shards
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return _KNOWN_AS.get(name, name.removeprefix("__main__."))


def why(value: Placeholder) -> str:
    """Return why the object was not copied."""
    return str(value._why)


def first_line(text: str) -> str:
    """Return the first line of a text, shortened: some errors print whole tensors."""
    line = text.split("\n", 1)[0]
    return line if len(line) <= _LONGEST_WHY else line[:_LONGEST_WHY] + "…"


_KNOWN_AS = {
    "_thread.lock": "threading.Lock",
    "_thread.RLock": "threading.RLock",
    "_io.TextIOWrapper": "open file",
    "_io.BufferedReader": "open file",
    "_io.BufferedWriter": "open file",
    "_io.BufferedRandom": "open file",
    "_io.FileIO": "open file",
    "socket.socket": "socket",
}

_USES = (
    *("call", "iter", "next", "len", "bool", "int", "float", "index", "getitem", "setitem"),
    *("delitem", "contains", "enter", "exit", "await", "aiter", "anext", "aenter", "aexit"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul"),
    *("floordiv", "rfloordiv", "mod", "rmod", "divmod", "rdivmod", "pow", "rpow"),
    *("neg", "pos", "abs", "invert", "round", "lt", "le", "gt", "ge", "delattr"),
    *("and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift", "rrshift"),
)
for _use in _USES:
    setattr(Placeholder, f"__{_use}__", Placeholder._refuse)
