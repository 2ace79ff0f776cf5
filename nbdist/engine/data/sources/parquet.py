"""Parquet files as a source: a group is a row group.

What a table says of a file comes with it: columns that are constant in it (partitions), rows that
are deleted, and names of columns that have changed since.

Threads: `read` on reader threads; everything else while the loader is made.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nbdist.engine.data.sources import agreed, arrow_columns, urls
from nbdist.engine.data.sources.source import Columns, fingerprint
from nbdist.shared.errors import DataError

OpenFile = Callable[[str], Any]

_FIELD_ID = b"PARQUET:field_id"  # where pyarrow keeps a column's number
_FOOTERS = 256  # that a rank keeps; those of a thousand files with many columns are a gigabyte


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file of a source.

    Attributes:
        path: As its filesystem calls it.
        name: Below the source's folder; the same wherever the data lies.
        size_bytes: Its length.
        constants: Columns that have one value in all rows, and are not read from the file.
        deleted: Rows that no longer count, in ascending order, int64[deleted].
        names: What a column is called in the file, where that is not its name; None: it is not
            in the file, and is null.
    """

    path: str
    name: str
    size_bytes: int
    constants: Mapping[str, Any] = field(default_factory=dict)
    deleted: npt.NDArray[np.int64] | None = None
    names: Mapping[str, str | None] = field(default_factory=dict)


class _Footer(NamedTuple):
    """What the loader must know of a file before it reads it: rows of each row group, and types."""

    rows: list[int]
    schema: Any


class ParquetSource:
    """Row groups of Parquet files."""

    def __init__(
        self,
        name: str,
        open_file: OpenFile,
        files: Sequence[DataFile],
        columns: Sequence[str] | None = None,
        schema: Any = None,
        field_ids: Mapping[str, int] | None = None,
        gone: str = "",
        *,
        is_far: bool = False,
    ) -> None:
        """Read the footers. Collective.

        Args:
            name: As its user knows it.
            open_file: Opens a file by its path; can be pickled.
            files: The same on all ranks.
            columns: Those to read; None for all.
            schema: The table's, a pyarrow.Schema: files follow it, and may lack columns. None:
                all files with rows must have the same; a column of nulls alone may have no type.
            field_ids: Numbers of the schema's columns, by which a table finds them in its files
                whatever they are called there.
            gone: What to do where a file is no longer there.
            is_far: Whether files are opened in a store.

        Raises:
            DataError: Files of different schemas, or one that is no Parquet file.
            UsageError: A column that is not there.
        """
        self.name, self.is_far = name, is_far
        self._open_file, self._gone = open_file, gone
        footers = agreed.for_each(partial(_footer, open_file, gone), files, name)
        self._files = tuple(
            replace(file, names=_names(footer.schema, field_ids or {}))
            for file, footer in zip(files, footers, strict=True)
        )
        if schema is None:
            schemas = [
                arrow_columns.with_fields(footer.schema, file.constants)
                for file, footer in zip(self._files, footers, strict=True)
            ]
            counted = [sum(footer.rows) for footer in footers]
            schema = common_schema([file.name for file in files], schemas, counted, columns)
        self._schema = arrow_columns.chosen(schema, columns, name)
        self._groups: list[tuple[int, int, int]] = []  # file, row group, its first row in the file
        sizes: list[int] = []
        for nth, (file, footer) in enumerate(zip(self._files, footers, strict=True)):
            first = 0
            for row_group, rows in enumerate(footer.rows):
                if left := rows - len(_within(file.deleted, first, rows)):
                    self._groups.append((nth, row_group, first))
                    sizes.append(left)
                first += rows
        self.sizes = np.array(sizes, dtype=np.int64)
        about = [(one.name, one.size_bytes) for one in self._files]
        self.fingerprint = fingerprint([*about, self.sizes])
        self._begin()

    def _begin(self) -> None:
        self._kept: OrderedDict[int, Any] = OrderedDict()  # footers, the newest last
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_kept", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def where(self, group: int) -> str:
        """Return file and row group, for messages."""
        file, row_group, _ = self._groups[group]
        return f"{self._files[file].name}, row group {row_group}"

    def read(self, group: int) -> Columns:
        """Return the columns of a row group."""
        nth, row_group, first = self._groups[group]
        file = self._files[nth]
        try:
            with self._open_file(file.path) as stream:
                parquet = _parquet().ParquetFile(
                    stream, metadata=self._kept_footer(nth), pre_buffer=urls.is_far(stream)
                )
                self._keep_footer(nth, parquet.metadata)
                table = _table(parquet, row_group, self._names_in(file), at_once=self.is_far)
            return self._as_columns(table, file, first)
        except Exception as error:
            self._forget_footer(nth)  # what lies there now, or next time, may be another file
            where = f"{self.where(group)} of {self.name}"
            raise urls.reason(error, where, self._gone) from error

    def _names_in(self, file: DataFile) -> list[str]:
        own = [n for n in self._schema.names if n not in file.constants]
        return [name for n in own if (name := file.names.get(n, n)) is not None]

    def _as_columns(self, table: Any, file: DataFile, first: int) -> Columns:
        if len(deleted := _within(file.deleted, first, table.num_rows)):
            table = table.filter(arrow_columns.kept(table.num_rows, deleted - first))
        found = {
            name: file.constants[name]
            if name in file.constants
            else arrow_columns.column(table, file.names.get(name, name))
            for name in self._schema.names
        }
        return arrow_columns.of(found, self._schema, table.num_rows)

    def _kept_footer(self, nth: int) -> Any:
        with self._lock:
            if nth in self._kept:
                self._kept.move_to_end(nth)
            return self._kept.get(nth)

    def _forget_footer(self, nth: int) -> None:
        with self._lock:
            self._kept.pop(nth, None)

    def _keep_footer(self, nth: int, footer: Any) -> None:
        with self._lock:
            self._kept[nth] = footer
            if len(self._kept) > _FOOTERS:
                self._kept.popitem(last=False)


def _table(parquet: Any, row_group: int, names: Sequence[str], *, at_once: bool) -> Any:
    """Return columns of a row group, read by this thread alone: others read others.

    All at once they are fewer requests. One by one they take less memory, for what decoding a
    column takes, three times its size if it is of lists, is given back before the next one.
    """
    here = set(parquet.schema_arrow.names)  # a table's older file may lack some
    names = [name for name in names if name in here]
    portions = [names] if at_once or not names else [[name] for name in names]
    tables = [parquet.read_row_group(row_group, some, use_threads=False) for some in portions]
    table = tables[0]
    for one in tables[1:]:
        table = table.append_column(one.field(0), one.column(0))
    return table


def _footer(open_file: OpenFile, gone: str, file: DataFile) -> _Footer:
    try:
        with open_file(file.path) as stream:
            footer = _parquet().read_metadata(stream)
    except Exception as error:
        raise urls.reason(error, file.path, gone) from error
    rows = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
    return _Footer(rows, footer.schema.to_arrow_schema().remove_metadata())


def _names(schema: Any, field_ids: Mapping[str, int]) -> dict[str, str | None]:
    """Return what a file calls the columns with these numbers, where it has numbers at all."""
    numbers = {
        int(field.metadata[_FIELD_ID]): field.name
        for field in schema
        if field.metadata and _FIELD_ID in field.metadata
    }
    return {name: numbers.get(number) for name, number in field_ids.items()} if numbers else {}


def _parquet() -> Any:
    import pyarrow.parquet

    return pyarrow.parquet


def _within(rows: npt.NDArray[np.int64] | None, first: int, count: int) -> npt.NDArray[np.int64]:
    """Return those of ascending row numbers that lie in `range(first, first + count)`."""
    if rows is None:
        return np.empty(0, dtype=np.int64)
    low, high = np.searchsorted(rows, (first, first + count))
    return rows[low:high]


def common_schema(
    files: Sequence[str], schemas: Sequence[Any], rows: Sequence[int], columns: Sequence[str] | None
) -> Any:
    """Return the schema of files; refuse those that differ in a column that is read.

    pandas gives no type to columns in which nothing stands: files without rows do not count, and
    a column of nulls alone is of the type that it has elsewhere.

    Args:
        files: Their names.
        schemas: Of each, a pyarrow.Schema.
        rows: How many each has.
        columns: Those that are read; None for all.

    Raises:
        DataError: It names the column, two files and both types.
    """
    filled = [
        (file, schema) for file, schema, count in zip(files, schemas, rows, strict=True) if count
    ]
    (first, schema), *others = filled or [(files[0], schemas[0])]
    having = dict.fromkeys(schema.names, first)  # by column, the file that gives its type
    for file, other in others:
        for name in columns or dict.fromkeys([*schema.names, *other.names]):
            known, here = _type(schema, name), _type(other, name)
            if known == here or (here == "null" and known != "missing"):
                continue
            if known == "null" and here != "missing":
                schema = schema.set(schema.get_field_index(name), other.field(name))
                having[name] = file
                continue
            raise DataError(
                f"The files differ in column {name!r}: {known} in {having.get(name, first)}, "
                f"{here} in {file}.",
                why="all files of a folder must have one schema; only a table can add columns",
                do=_one_schema(known, here),
            )
    return schema


def _one_schema(known: str, here: str) -> str:
    """Return what to do where a column has two types, or is missing."""
    if "missing" in (known, here):
        return "name columns= that all files have, rewrite the files, or make it a table"
    return (
        "choose the type: nbdist.loader(pyarrow.dataset.dataset(path, schema=...)) reads all files "
        "by that schema; or rewrite the files, or leave the column out by columns="
    )


def _type(schema: Any, name: str) -> str:
    return str(schema.field(name).type) if name in schema.names else "missing"
