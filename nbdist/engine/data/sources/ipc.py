"""Arrow files (IPC, Feather) as a source: a group is a record batch.

Threads: `read` on reader threads; everything else while the loader is made.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nbdist.engine.data.sources import agreed, arrow_columns, urls
from nbdist.engine.data.sources.parquet import OpenFile, common_schema
from nbdist.engine.data.sources.source import Columns, fingerprint
from nbdist.shared.errors import DataError


class _About(NamedTuple):
    rows: list[int]
    schema: Any


class ArrowSource:
    """Record batches of Arrow files."""

    def __init__(
        self,
        name: str,
        open_file: OpenFile,
        files: Sequence[urls.Listed],
        columns: Sequence[str] | None = None,
        *,
        is_far: bool = False,
    ) -> None:
        """Count the rows of each record batch. Collective.

        Args:
            name: As its user knows it.
            open_file: Opens a file by its path; can be pickled.
            files: The same on all ranks.
            columns: Those to read; None for all.
            is_far: Whether files are opened in a store.

        Raises:
            DataError: Files of different schemas, or one that is no Arrow file.
            UsageError: A column that is not there.
        """
        self.name, self.is_far = name, is_far
        self._open_file, self._files = open_file, tuple(files)
        about = agreed.for_each(self._about, self._files, name)
        names, schemas = [one.name for one in files], [one.schema for one in about]
        schema = common_schema(names, schemas, [sum(one.rows) for one in about], columns)
        self._schema = arrow_columns.chosen(schema, columns, name)
        counted = [
            (file, nth, rows)
            for file, one in enumerate(about)
            for nth, rows in enumerate(one.rows)
            if rows
        ]
        self._groups = [(file, nth) for file, nth, _ in counted]
        self.sizes = np.array([rows for *_, rows in counted], dtype=np.int64)
        self.fingerprint = fingerprint([*((f.name, f.size_bytes) for f in files), self.sizes])

    def where(self, group: int) -> str:
        """Return file and record batch, for messages."""
        file, nth = self._groups[group]
        return f"{self._files[file].name}, record batch {nth}"

    def read(self, group: int) -> Columns:
        """Return the columns of a record batch."""
        import pyarrow as pa

        file, nth = self._groups[group]
        try:
            with self._open_file(self._files[file].path) as stream:
                batch = pa.ipc.open_file(stream).get_batch(nth)
            found = {name: pa.chunked_array([batch.column(name)]) for name in self._schema.names}
            return arrow_columns.of(found, self._schema, batch.num_rows)
        except Exception as error:
            raise urls.reason(error, f"{self.where(group)} of {self.name}") from error

    def _about(self, file: urls.Listed) -> _About:
        import pyarrow as pa

        try:
            with self._open_file(file.path) as stream:
                # Of one column: a record batch's length is in the head of its message.
                options = pa.ipc.IpcReadOptions(included_fields=[0])
                reader = pa.ipc.open_file(stream, options=options)
                rows = [reader.get_batch(n).num_rows for n in range(reader.num_record_batches)]
            with self._open_file(file.path) as stream:
                return _About(rows, pa.ipc.open_file(stream).schema.remove_metadata())
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{file.path} is no Arrow file with an index.",
                why="an Arrow stream, or something else: its record batches cannot be found alone",
                do="write it by pyarrow.ipc.new_file, or as Parquet",
            ) from error
