"""Generators that a dataset holds: each worker draws from a copy, whose progress is not known.

Main thread.
"""

import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_NO_HOLDERS = (type, ModuleType, torch.Tensor)
_DEEP = 6
_WIDE = 64  # longer lists hold samples


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
