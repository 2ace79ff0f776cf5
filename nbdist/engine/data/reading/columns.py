"""Columns of samples, as groups are read into them and batches are cut from them.

A column is a numpy array (its first dimension counts samples), a pyarrow array (strings, binary,
lists, structs) or a list. pyarrow is not imported here: what is no numpy array and no list is one.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nbdist.engine.data.sources.source import Columns


def count(columns: Columns) -> int:
    """Return how many samples there are."""
    return len(next(iter(columns.values())))


def chunks(columns: Columns, order: npt.NDArray[np.int64], size: int) -> Iterator[Columns]:
    """Yield the samples in an order, `size` at a time; each chunk is a copy."""
    total = count(columns)
    for start in range(0, total, size):
        rows = order[start : start + size]
        yield {name: take_rows(column, rows) for name, column in columns.items()}


def take_rows(column: Any, rows: npt.NDArray[np.int64]) -> Any:
    """Return some samples of a column in an order, copied."""
    if isinstance(column, np.ndarray):
        out = _empty((len(rows), *column.shape[1:]), column.dtype)
        # "clip" as "raise" would copy once more into `out`; no row is out of range.
        return np.take(column, rows, axis=0, out=out, mode="clip")
    if isinstance(column, list):
        return [column[i] for i in rows.tolist()]
    return column.take(_pyarrow().array(rows))


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an array from Arrow's pool of memory, where there is one.

    Groups are read into that pool, and it takes again what they give back. From glibc each thread
    would have an arena of its own, that grows and shrinks with every group.
    """
    pa = sys.modules.get("pyarrow")
    if pa is None or dtype.hasobject:
        return np.empty(shape, dtype)
    buffer = pa.allocate_buffer(math.prod(shape) * dtype.itemsize)
    return np.frombuffer(buffer, dtype).reshape(shape)


def cut(columns: Columns, start: int, stop: int) -> Columns:
    """Return some samples in a row; arrays are not copied."""
    return {name: column[start:stop] for name, column in columns.items()}


def joined(parts: Sequence[Columns]) -> Columns:
    """Return the samples of several parts one after the other, copied."""
    return {name: join([part[name] for part in parts]) for name in parts[0]}


def join(parts: list[Any]) -> Any:
    """Return one column of several, one after the other, copied.

    Lists of numbers are two-dimensional arrays in groups where all have one length. Where another
    group's have not, the column is a list of arrays.
    """
    if are_alike(parts):
        return np.concatenate(parts)
    if not any(isinstance(part, np.ndarray | list) for part in parts):
        return _pyarrow().concat_arrays(parts)
    return [sample for part in parts for sample in _samples(part)]


def are_alike(parts: list[Any]) -> bool:
    """Return whether columns are numpy arrays of samples of one shape."""
    shapes = {part.shape[1:] if isinstance(part, np.ndarray) else None for part in parts}
    return len(shapes) == 1 and None not in shapes


def _samples(column: Any) -> list[Any]:
    if isinstance(column, np.ndarray | list):
        return list(column)
    return [one.values.to_numpy(zero_copy_only=False) if one.is_valid else None for one in column]


def _pyarrow() -> Any:
    return sys.modules["pyarrow"]


def numbers_of_lists(column: Any) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]] | None:
    """Return all numbers of an Arrow array of lists, copied, and the length of each list.

    None where it holds something else, or a list or a number is missing.
    """
    pa = _pyarrow()
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or column.null_count:
        return None
    flat = column.flatten()
    is_number = pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type)
    if not is_number or flat.null_count:
        return None
    lengths = np.diff(column.offsets.to_numpy()).astype(np.int64)
    return flat.to_numpy().copy(), lengths
