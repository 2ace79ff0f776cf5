"""Whether ranks hold the same samples at the same places, as far as what a dataset holds tells.

A rank is given places in an epoch. What stands there is for its dataset to say, and its sampler:
an unseeded `random_split` gives each rank other samples at the same places. Main thread.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

_VALUES = 1024  # of each that are compared, evenly spaced
_DEEP = 8  # datasets in datasets
_WIDE = 8  # of what stands at one place
_PLAIN = (int, float, str, bytes)


def digests(dataset: Any) -> dict[str, int]:
    """Return a number for each list, array and tensor that tells which sample stands where.

    Of those that a dataset holds by an attribute, and a dataset in it, and so on. Of a path the
    name counts: hosts may keep the same files in other folders.
    """
    return {name: zlib.crc32(found) for name, found in _held("dataset", dataset, _DEEP)}


def differing(reports: Sequence[Mapping[str, int]]) -> str:
    """Return the first that is not the same on all ranks; "" where all are."""
    for name in reports[0] if reports else ():
        if len({one.get(name) for one in reports}) > 1:
            return name
    return ""


def _held(name: str, value: Any, deep: int) -> Iterator[tuple[str, bytes]]:
    """Yield what `value` holds by its attributes, or is itself, with the name of each."""
    if isinstance(value, tuple) and value and all(map(_is_array, value)):
        for nth, one in enumerate(value):
            yield from _held(f"{name}[{nth}]", one, deep)
    elif _is_array(value) or type(value) in (list, tuple):
        yield name, repr(_some_of(value)).encode()
    elif deep and hasattr(value, "__getitem__") and hasattr(value, "__dict__"):
        for attribute, inner in vars(value).items():
            yield from _held(f"{name}.{attribute}", inner, deep - 1)


def _is_array(value: Any) -> bool:
    is_tensor = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_meta
    return (is_tensor or isinstance(value, np.ndarray)) and bool(value.ndim)


def _some_of(value: Any) -> list[Any]:
    some = value[:: max(1, -(-len(value) // _VALUES))]
    if _is_array(some):
        some = some.reshape(len(some), -1)[:, :_WIDE].tolist()
    return [_plain(one) for one in some]


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value[:_WIDE]]
    value = value.rpartition("/")[2] if isinstance(value, str) else value
    return value if isinstance(value, _PLAIN) else type(value).__name__
