"""The purpose of a collective: which parameters of FSDP2 it carries, or buffers.

A unit gathers its parameters, and reduces the gradients of those that had one, as one buffer. Ranks
that take different branches of a model would sum gradients of different parameters of one size:
so ranks compare the names too (`collective_check`). Buffers are sent after a forward in training
alone, and a peer in evaluation is at another collective by then.

Threads: each thread reads only what it has entered.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, wraps
from hashlib import blake2b
from posixpath import commonpath
from time import perf_counter_ns
from typing import Any
from weakref import WeakKeyDictionary

from nbdist.engine.compat import torch_sharded

_SHOWN = 4  # names in an error


@dataclass(frozen=True, slots=True)
class Purpose:
    """The parameters, or buffers, that a collective carries.

    Attributes:
        key: Equal on all ranks with the same names; 0 where nothing is known.
        text: The names, for people.
        unit: What all names begin with, or the first one, of parameters.
    """

    key: int = 0
    text: str = ""
    unit: str = ""

    def describe(self, key: int) -> str:
        """Return the purpose of a call with this key, as far as this rank knows it."""
        if key == BUFFERS.key:
            return f" for {BUFFERS.text}"
        if not key or not self.key:
            return ""
        return f" for {self.text if key == self.key else 'other parameters'}"


UNKNOWN = Purpose()
# Known without a call of one's own; the keys of parameters are odd.
BUFFERS = Purpose(2, "buffers after a forward in training")


class _Now(threading.local):
    purpose = UNKNOWN
    gather: Any = None  # the LaunchedCollective of parameters, if that is what was sent last


now = _Now()
# The newest gather of each unit, by its first parameter.
_gathers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


@lru_cache(maxsize=4096)  # a step asks for each unit twice or three times
def of_parameters(names: tuple[str, ...]) -> Purpose:
    """Return the purpose of a collective that carries these parameters, in this order."""
    if not names or not all(names):
        return UNKNOWN  # a unit whose root has not run yet
    digest = blake2b("|".join(names).encode(), digest_size=8).digest()
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    shared = commonpath([name.replace(".", "/") for name in names]).replace("/", ".")
    unit = shared or f"{names[0]} and {len(names) - 1} more"
    return Purpose(int.from_bytes(digest, "little") | 1, ", ".join(names[:_SHOWN]) + more, unit)


@contextmanager
def sends(purpose: Purpose) -> Iterator[None]:
    """Set the purpose of this thread's collectives."""
    outer, now.purpose = now.purpose, purpose
    try:
        yield
    finally:
        now.purpose = outer


def declared(native: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that sends a unit's parameters, its first argument, or their gradients."""
    name_of = torch_sharded.name_in_unit

    @wraps(native)
    def send(parameters: Sequence[Any], *args: Any, **keywords: Any) -> Any:
        with sends(of_parameters(tuple(map(name_of, parameters)))):
            result = native(parameters, *args, **keywords)
        if now.gather is not None:
            _gathers[parameters[0]], now.gather = now.gather, None
        return result

    return send


def freed(parameters: Sequence[Any]) -> None:
    """Note that a unit's parameters, which were gathered, are shards again."""
    gather = _gathers.get(parameters[0])
    if gather is not None:
        gather.freed_ns = perf_counter_ns()
