"""Folders, patterns and lists of Parquet or Arrow files. While a loader is made."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from nbdist.engine.data.sources import agreed, urls
from nbdist.engine.data.sources.ipc import ArrowSource
from nbdist.engine.data.sources.parquet import DataFile, ParquetSource
from nbdist.shared.errors import UsageError

PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".feather", ".ipc")
ENDINGS = (*PARQUET, *ARROW)
_NULL = "__HIVE_DEFAULT_PARTITION__"


def open_folder(
    paths: Sequence[str | Path], columns: Sequence[str] | None, options: Mapping[str, Any] | None
) -> ParquetSource | ArrowSource:
    """Return the groups of the Parquet files that paths or URLs name; else of the Arrow files.

    Collective.

    Folders named `key=value` give a column `key`, as Hive and Spark write them.

    Raises:
        DataError: Nothing is there, no file that counts, or files of different schemas.
        UsageError: A URL that fsspec cannot open, or a column that is not there.
    """
    name = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    opened = [urls.filesystem(str(path), options) for path in paths]

    def listed() -> list[urls.Listed]:
        for fs, path in opened:
            _refuse_hudi(fs, path)
        return [one for fs, path in opened for one in urls.files(fs, path, ENDINGS)]

    found = agreed.from_rank_0(listed, name)
    open_file, is_far = partial(urls.open_file, opened[0][0]), not urls.is_local(opened[0][0])
    if not any(one.name.endswith(PARQUET) for one in found):
        return ArrowSource(name, open_file, found, columns, is_far=is_far)
    found = [one for one in found if not one.name.endswith(ARROW)]
    constants = _typed([_partitions(one.name) for one in found])
    files = [
        DataFile(one.path, one.name, one.size_bytes, here)
        for one, here in zip(found, constants, strict=True)
    ]
    return ParquetSource(name, open_file, files, columns, is_far=is_far)


def _refuse_hudi(fs: Any, path: str) -> None:
    """Refuse a Hudi table's folder: older commits' files lie there too, and would be read twice."""
    if fs.isdir(f"{path.rstrip('/')}/.hoodie"):
        raise UsageError(
            f"{path} is a Hudi table, whose timeline nbdist does not read.",
            why="its folder holds files of several commits, and rows would come more than once",
            do="give the base files (.parquet) of its newest commit as a list of paths",
        )


def _partitions(name: str) -> dict[str, str | None]:
    """Return what the folders of a file say: `year=2024/month=7/part.parquet`."""
    pairs = [folder.partition("=") for folder in PurePosixPath(name).parts[:-1] if "=" in folder]
    return {key: None if value == _NULL else unquote(value) for key, _, value in pairs}


def _typed(found: Sequence[Mapping[str, str | None]]) -> list[dict[str, Any]]:
    """Return the values as integers in columns that hold nothing else."""
    import pyarrow as pa

    texts: dict[str, list[str | None]] = {}
    for one in found:
        for name, text in one.items():
            texts.setdefault(name, []).append(text)
    kinds = {
        name: pa.int64() if all(map(_is_int, of)) else pa.string() for name, of in texts.items()
    }
    return [
        {n: pa.scalar(text, pa.string()).cast(kinds[n]) for n, text in one.items()} for one in found
    ]


def _is_int(text: str | None) -> bool:
    return text is not None and text.isascii() and text.lstrip("-").isdecimal()
