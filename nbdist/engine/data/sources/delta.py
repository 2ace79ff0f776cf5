"""Delta tables as sources, by deltalake: the Parquet files of one version. While a loader is made.

The version is that of the table when the loader is made, as rank 0 sees it. deltalake reads the
log; files are read as any others are.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from nbdist.engine.data.sources import agreed, urls
from nbdist.engine.data.sources.parquet import DataFile, ParquetSource
from nbdist.shared.errors import DataError, UsageError, install

LOG = "_delta_log"
# deltalake calls S3's options otherwise than fsspec does.
_S3_OPTIONS = {
    "key": "AWS_ACCESS_KEY_ID",
    "secret": "AWS_SECRET_ACCESS_KEY",
    "token": "AWS_SESSION_TOKEN",
    "endpoint_url": "AWS_ENDPOINT_URL",
}


class _Table(NamedTuple):
    """What rank 0 finds in a table's log."""

    name: str
    url: str
    files: list[DataFile]
    schema: Any


def is_table(path: str | Path, options: Mapping[str, Any] | None) -> bool:
    """Return whether a folder is a Delta table's, as rank 0 sees it. Collective."""

    def has_log() -> bool:
        fs, folder = urls.filesystem(str(path), options)
        return bool(fs.isdir(f"{folder.rstrip('/')}/{LOG}"))

    return agreed.from_rank_0(has_log, str(path))


def open_delta(
    table: Any, columns: Sequence[str] | None, options: Mapping[str, Any] | None
) -> ParquetSource:
    """Return the row groups of a table's version. Collective.

    Args:
        table: A deltalake.DeltaTable, or the folder or URL of one.
        columns: Those to read; None for all.
        options: For the filesystem behind a URL, as fsspec takes them.

    Raises:
        DataError: The table cannot be read.
        UsageError: deltalake is missing, or a column is not there.
    """
    found = agreed.from_rank_0(lambda: _read_log(table, options), str(table))
    fs, root = urls.filesystem(found.url, options)
    open_file = partial(urls.open_below, fs, root.rstrip("/"))
    gone = "the files of this version were deleted (vacuum): make the loader of a newer one"
    return ParquetSource(
        found.name,
        open_file,
        found.files,
        columns,
        found.schema,
        gone=gone,
        is_far=not urls.is_local(fs),
    )


def _read_log(table: Any, options: Mapping[str, Any] | None) -> _Table:
    import pyarrow as pa

    if isinstance(table, str | Path):
        table = _opened(str(table), options)
    _refuse_unknown(table)
    url, version = table.table_uri, table.version()
    schema = pa.schema(table.schema().to_arrow())
    actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    deleted = _deleted(table)
    partitions = list(table.metadata().partition_columns)
    files = []
    for action in sorted(actions, key=lambda one: str(one["path"])):
        path = unquote(action["path"])
        constants = {
            n: pa.scalar(action.get(f"partition.{n}")).cast(schema.field(n).type)
            for n in partitions
        }
        mask = next((rows for uri, rows in deleted.items() if unquote(uri).endswith(path)), None)
        files.append(DataFile(path, path, int(action["size_bytes"]), constants, mask))
    if not files:
        raise DataError(f"{url} is empty in version {version}.")
    return _Table(f"{url} version {version}", url, files, schema)


def _opened(url: str, options: Mapping[str, Any] | None) -> Any:
    try:
        import deltalake
    except ImportError as error:
        raise UsageError(
            f"{url} is a Delta table, and deltalake is missing.",
            do=f"{install('delta')}, where the ranks run",
        ) from error
    named = {_S3_OPTIONS.get(k, k): v for k, v in (options or {}).items() if isinstance(v, str)}
    if named.get("AWS_ENDPOINT_URL", "").startswith("http://"):
        named["AWS_ALLOW_HTTP"] = "true"
    return deltalake.DeltaTable(url, storage_options=named or None)


def _refuse_unknown(table: Any) -> None:
    """Refuse what the files alone do not say: their names for columns."""
    mode = table.metadata().configuration.get("delta.columnMapping.mode", "none")
    if mode != "none":
        raise UsageError(
            f"{table.table_uri} maps its columns' names ({mode}), which nbdist does not read.",
            do="write a copy without delta.columnMapping.mode, and load that",
        )


def _deleted(table: Any) -> dict[str, Any]:
    """Return the rows that deletion vectors leave out, by the file's URI."""
    import pyarrow as pa

    found = pa.table(table.deletion_vectors())
    masks = zip(found["filepath"].to_pylist(), found["selection_vector"].to_pylist(), strict=True)
    return {uri: np.flatnonzero(~np.array(kept, dtype=bool)) for uri, kept in masks}
