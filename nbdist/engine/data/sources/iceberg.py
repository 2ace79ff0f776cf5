"""Iceberg tables as sources, by pyiceberg: the Parquet files of one snapshot.

The snapshot is the table's current one when the loader is made, as rank 0 sees it. pyiceberg plans
which files it has, and opens them with the catalog's own access. While a loader is made, but
`_opened` on reader threads too.
"""

import uuid
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nbdist.engine.data.sources import agreed, urls
from nbdist.engine.data.sources.parquet import DataFile, ParquetSource
from nbdist.shared.errors import DataError, UsageError


class _Snapshot(NamedTuple):
    """What rank 0 finds in a table's metadata."""

    name: str
    files: list[DataFile]
    schema: Any
    field_ids: dict[str, int]


def open_iceberg(table: Any, columns: Sequence[str] | None) -> ParquetSource:
    """Return the row groups of a table's current snapshot. Collective.

    Args:
        table: A pyiceberg.table.Table, the same on all ranks.
        columns: Those to read; None for all.

    Raises:
        DataError: The table cannot be read.
        UsageError: Files that are not Parquet, or a column that is not there.
    """
    name = ".".join(table.name())
    found = agreed.from_rank_0(lambda: _plan(table, name), name)
    gone = "this snapshot has expired: load the table and make the loader again"
    return ParquetSource(
        found.name,
        partial(_opened, table.io),
        found.files,
        columns,
        found.schema,
        found.field_ids,
        gone,
        is_far=not all(_is_here(file.path) for file in found.files),
    )


def _is_here(path: str) -> bool:
    return path.startswith("file://") or "://" not in path


def _opened(io: Any, path: str) -> Any:
    if _is_here(path):
        return urls.open_file(*urls.filesystem(path))
    return io.new_input(path).open(seekable=True)


def _plan(table: Any, name: str) -> _Snapshot:
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    snapshot = table.current_snapshot()
    if snapshot is None:
        raise DataError(f"{name} is empty: it has no snapshot.")
    fields = table.schema().fields
    if with_default := [one.name for one in fields if one.initial_default is not None]:
        raise UsageError(
            f"Column {with_default[0]!r} of {name} has a default for rows that were written before "
            "it was added, which nbdist does not read.",
            do="leave it out by columns=, or rewrite the table",
        )
    tasks = sorted(table.scan().plan_files(), key=lambda task: str(task.file.file_path))
    if other := [task.file for task in tasks if task.file.file_format.name != "PARQUET"]:
        raise UsageError(f"{name} has {other[0].file_format.name} files; nbdist reads Parquet.")
    schema = schema_to_pyarrow(table.schema(), include_field_ids=False)
    root = table.location().rstrip("/") + "/"
    deleted = PositionDeletes(table.io)
    files = [
        DataFile(
            task.file.file_path,
            task.file.file_path.removeprefix(root),
            int(task.file.file_size_in_bytes),
            _constants(table, task.file, schema),
            deleted.of(task.file.file_path, task.delete_files),
        )
        for task in tasks
    ]
    ids = {one.name: one.field_id for one in fields}
    return _Snapshot(f"{name} snapshot {snapshot.snapshot_id}", files, schema, ids)


def _constants(table: Any, file: Any, schema: Any) -> dict[str, Any]:
    """Return columns that a partition gives as they are: files taken over from Hive lack them.

    pyiceberg has a date as its days, so a value takes the type of its column.
    """
    import pyarrow as pa

    spec = table.specs()[file.spec_id]
    found = {}
    for nth, one in enumerate(spec.fields):
        value = file.partition[nth]
        # A UUID is in the files, and no type of Arrow takes it.
        if str(one.transform) == "identity" and not isinstance(value, uuid.UUID | None):
            column = table.schema().find_column_name(one.source_id)
            if column in schema.names:
                found[column] = pa.scalar(value, schema.field(column).type)
    return found


class PositionDeletes:
    """The rows that a table's delete files name; each file is read once for all data files."""

    def __init__(self, io: Any) -> None:
        """Begin with none read; `io` is the table's."""
        self._io = io
        self._read: dict[str, Any] = {}  # by path, with columns file_path and pos

    def of(self, path: str, deletes: Iterable[Any]) -> npt.NDArray[np.int64] | None:
        """Return the deleted rows of a data file, in ascending order; None without delete files.

        Raises:
            UsageError: Deletes that are not positions in a Parquet file.
        """
        import pyarrow.compute as pc

        found = []
        for one in deletes:
            if one.content.name != "POSITION_DELETES" or one.file_format.name != "PARQUET":
                kind = one.content.name.lower().replace("_", " ")
                raise UsageError(
                    f"{path} has {kind} in {one.file_format.name} format, "
                    "which nbdist does not read.",
                    do="rewrite the table's data files (rewrite_data_files), "
                    "which applies its deletes",
                )
            rows = self._table(one.file_path)
            found.append(rows.filter(pc.equal(rows["file_path"], path))["pos"].to_numpy())
        return np.unique(np.concatenate(found)).astype(np.int64) if found else None

    def _table(self, path: str) -> Any:
        import pyarrow.parquet as pq

        if path not in self._read:
            with _opened(self._io, path) as stream:
                self._read[path] = pq.read_table(stream, columns=["file_path", "pos"])
        return self._read[path]
