"""The generators that users' code draws from: torch's, Python's and numpy's own, and a dataset's.

Each worker draws from a copy of a generator that a dataset holds, whose progress is not known.

Threads: of whoever draws.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_NO_HOLDERS = (type, ModuleType, torch.Tensor)
_DEEP = 6
_WIDE = 64  # longer lists hold samples


def seed_all(seed: int) -> None:
    """Have all three draw from `seed` on."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def kept() -> Iterator[None]:
    """Let the process draw on after the block as if nothing had been drawn in it."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def own_generators(dataset: Any) -> list[str]:
    """Return the names of generators that a dataset holds by attributes and short lists."""
    return [f"{type(dataset).__name__}{name}" for name in _held("", dataset, _DEEP, set())]


def _held(name: str, value: Any, deep: int, seen: set[int]) -> Iterator[str]:
    if isinstance(value, _KINDS):
        yield name
        return
    if not deep or id(value) in seen or isinstance(value, _NO_HOLDERS):
        return
    seen.add(id(value))
    if isinstance(value, list | tuple) and len(value) <= _WIDE:
        for nth, one in enumerate(value):
            yield from _held(f"{name}[{nth}]", one, deep - 1, seen)
    elif not isinstance(value, dict) and hasattr(value, "__dict__"):
        for attribute, one in vars(value).items():
            yield from _held(f"{name}.{attribute}", one, deep - 1, seen)
