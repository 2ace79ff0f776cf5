"""Arrow tables made columns that batches are cut from: numpy where that can hold them.

Any thread. pyarrow releases the GIL in all that takes time here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nbdist.engine.data.sources.source import Columns
from nbdist.shared.errors import DataError, UsageError


def _pa() -> Any:
    import pyarrow

    return pyarrow


def with_fields(schema: Any, constants: Mapping[str, Any]) -> Any:
    """Return a file's schema with fields for its constants, pyarrow scalars each."""
    for name, value in constants.items():
        if name not in schema.names:
            schema = schema.append(_pa().field(name, value.type))
    return schema


def chosen(schema: Any, columns: Sequence[str] | None, name: str) -> Any:
    """Return the fields that are asked for, in their order; all without.

    Raises:
        UsageError: One is not there.
    """
    if columns is None:
        return schema
    if unknown := [column for column in columns if column not in schema.names]:
        raise UsageError(
            f"{name} has no column {unknown[0]!r}.", do=f"choose from {', '.join(schema.names)}"
        )
    return _pa().schema([schema.field(column) for column in columns])


def column(table: Any, name: str | None) -> Any:
    """Return a column of a table; None where it is not there."""
    return None if name is None or name not in table.column_names else table.column(name)


def kept(rows: int, deleted: npt.NDArray[np.int64]) -> Any:
    """Return a mask of the rows that are not deleted."""
    mask = np.ones(rows, dtype=bool)
    mask[deleted] = False
    return _pa().array(mask)


def of(found: Mapping[str, Any], schema: Any, rows: int) -> Columns:
    """Return columns: a chunked array each, a scalar for all rows, or None for nulls.

    Args:
        found: By name, for each field of the schema.
        schema: The types that they are to have.
        rows: How many there are.

    Raises:
        DataError: A number is missing where its type cannot say so.
    """
    return {field.name: _of(found[field.name], field, rows) for field in schema}


def _of(value: Any, field: Any, rows: int) -> Any:
    pa = _pa()
    if value is None:
        value = pa.nulls(rows, field.type)
    elif not isinstance(value, pa.ChunkedArray):
        value = pa.repeat(value.cast(field.type), rows)
    if value.type != field.type:
        value = value.cast(field.type)
    if isinstance(value, pa.ChunkedArray):
        value = value.chunk(0) if value.num_chunks == 1 else pa.concat_arrays(value.chunks or [])
    return _as_numpy(value, field.name)


def _as_numpy(array: Any, name: str) -> Any:
    """Return numpy's array where it can hold an Arrow array, else that itself."""
    pa = _pa()
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _as_numpy(array.dictionary_decode(), name)
    if pa.types.is_decimal(kind):
        return _as_numpy(array.cast(pa.float64()), name)
    if pa.types.is_temporal(kind):
        return _as_numpy(_nanoseconds(array), name)
    if pa.types.is_fixed_size_list(kind) and _is_number(kind.value_type):
        _refuse_nulls(array, name)
        flat = _as_numpy(array.flatten(), name)
        return flat.reshape(len(array), kind.list_size)
    if not (_is_number(kind) or pa.types.is_boolean(kind)):
        return _by_length(array)
    if pa.types.is_floating(kind):
        return array.to_numpy(zero_copy_only=False)  # nulls become NaN
    _refuse_nulls(array, name)
    return array.to_numpy(zero_copy_only=False)


def _by_length(array: Any) -> Any:
    """Return lists of numbers that have one length as an array of two dimensions."""
    pa = _pa()
    kind = array.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return array
    if array.null_count or not _is_number(kind.value_type):
        return array
    flat, lengths = array.flatten(), np.diff(array.offsets.to_numpy())
    if flat.null_count or not len(array) or (lengths != lengths[0]).any():
        return array
    return flat.to_numpy(zero_copy_only=False).reshape(len(array), int(lengths[0]))


def _is_number(kind: Any) -> bool:
    pa = _pa()
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _nanoseconds(array: Any) -> Any:
    """Return times as int64: since 1970, since midnight, or how long, in nanoseconds."""
    pa = _pa()
    kind = array.type
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        array = array.cast(pa.timestamp("ns", getattr(kind, "tz", None)))
    elif pa.types.is_time(kind):
        array = array.cast(pa.time64("ns"))
    elif pa.types.is_duration(kind):
        array = array.cast(pa.duration("ns"))
    return array.view(pa.int64())


def _refuse_nulls(array: Any, name: str) -> None:
    if array.null_count:
        raise DataError(
            f"Column {name!r} has {array.null_count} nulls, and is {array.type}.",
            why="a tensor of this type has no value that says so",
            do="leave the column out by columns=, or fill it in the data",
        )
