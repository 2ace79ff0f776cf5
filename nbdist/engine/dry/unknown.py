"""Numbers of tensors that have none: they can be computed with and printed, and not known.

What decides by one asks `Decide` which way to go.
"""

import functools
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

Decide = Callable[[int], bool]
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
_UNARY = ("neg", "pos", "abs")


class NotKnownError(BaseException):
    """A cell cannot go on without a number. No Exception: a cell must not catch it."""


class Unknown:
    """A number that is not known.

    Args:
        value: Equal on ranks where the number is; see `values`.
        decide: Says which way a branch goes.
    """

    def __init__(self, value: int, decide: Decide) -> None:
        self.value = value
        self._decide = decide

    def of(self, name: str, *others: Any) -> "Unknown":
        """Return what an operation makes of it."""
        return Unknown(hash((name, self.value, *map(_value_of, others))), self._decide)

    def __bool__(self) -> bool:
        """Decide a branch."""
        return self._decide(self.value)

    def __hash__(self) -> int:
        return self.value

    def __repr__(self) -> str:
        return "?"

    def __format__(self, spec: str) -> str:
        return "?"

    def __round__(self, digits: int | None = None) -> "Unknown":
        return self.of("round", digits)

    def __float__(self) -> float:
        raise NotKnownError("a number of a tensor is asked for, and tensors have none here")

    __int__: Any = __float__
    __index__: Any = __float__

    def item(self) -> "Unknown":
        """Return itself, as a scalar of numpy does."""
        return self


def _value_of(one: Any) -> Any:
    return one.value if isinstance(one, Unknown) else repr(one)


def _binary(name: str) -> Callable[[Unknown, Any], Unknown]:
    return lambda own, other: own.of(name, other)


for _name in _BINARY:
    setattr(Unknown, f"__{_name}__", _binary(_name))
    setattr(Unknown, f"__r{_name}__", _binary(f"r{_name}"))
for _name in _COMPARED:
    setattr(Unknown, f"__{_name}__", _binary(_name))
for _name in _UNARY:
    setattr(Unknown, f"__{_name}__", functools.partialmethod(Unknown.of, _name))


class _Pickler(pickle.Pickler):
    has_values = True

    def persistent_id(self, one: Any) -> Any:
        if hasattr(one, "untyped_storage"):
            raise NotKnownError("ranks exchange objects that hold tensors, which is not followed")
        return (one.value if self.has_values else "?") if isinstance(one, Unknown) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, decide: Decide) -> None:
        super().__init__(io.BytesIO(content))
        self._decide = decide

    def persistent_load(self, value: Any) -> Unknown:
        return Unknown(value, self._decide)


def packed(one: Any, *, has_values: bool = True) -> bytes:
    """Return an object for another rank; numbers in it that are not known stay what they are.

    Without their values it is the same on ranks that bring the same but for these.

    Raises:
        NotKnownError: It holds tensors, or what cannot be sent.
    """
    content = io.BytesIO()
    try:
        pickler = _Pickler(content)
        pickler.has_values = has_values
        pickler.dump(one)
    except Exception as error:
        raise NotKnownError(f"ranks exchange what cannot be pickled here: {error}") from error
    return content.getvalue()


def unpacked(content: bytes, decide: Decide) -> Any:
    """Return an object of another rank."""
    return _Unpickler(content, decide).load()


def in_math() -> None:
    """Have functions of `math` take such numbers. Of this process, for good."""
    for name, function in vars(math).items():
        if callable(function) and not name.startswith("_"):
            setattr(math, name, _taking(name, function))


def _taking(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **keywords: Any) -> Any:
        for one in args:
            if isinstance(one, Unknown):
                return one.of(name, *args)
        return function(*args, **keywords)

    return call


def converted(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Return `float`, `int` or `bool` for the code of a cell: of what is not known, it is none."""

    def convert(*args: Any) -> Any:
        one: Any = args[0] if args else None
        if hasattr(one, "item") and not isinstance(one, Unknown):
            one = one.item()
        if isinstance(one, Unknown):
            return one if kind is float else one.of(kind.__name__)
        return kind(one, *args[1:]) if args else kind()

    return convert


def formatted(text: str, given: Any) -> str:
    """Return `text % given`, with "?" for what is not known."""
    parts = given if isinstance(given, tuple) else (given,)
    if not any(isinstance(one, Unknown) for one in parts):
        return str(text % given)
    return f"{text} ?"
