"""Find the source for what `nbdist.loader` was given. Main thread, all ranks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nbdist.engine.data.sources import arrow_dataset, delta, folder, iceberg, tars
from nbdist.engine.data.sources.source import Source

# Returns the source of what it was given, or None if that is of another kind.
Opener = Callable[[Any, Sequence[str] | None, Mapping[str, Any] | None], Source | None]


def paths_in(data: Any) -> list[str | Path]:
    """Return the paths that were given; none where it is something else.

    A list of texts may be a dataset of its own: those of paths end as data files do, or are URLs.
    """
    if isinstance(data, str | Path):
        return [data]
    if not isinstance(data, list | tuple) or not data:
        return []
    return list(data) if all(isinstance(o, Path) or _is_path(o) for o in data) else []


def _is_path(one: Any) -> bool:
    return isinstance(one, str) and (one.endswith((*folder.ENDINGS, tars.ENDING)) or "://" in one)


def _folder(
    data: Any, columns: Sequence[str] | None, options: Mapping[str, Any] | None
) -> Source | None:
    paths = paths_in(data)
    return folder.open_folder(paths, columns, options) if paths else None


def _tars(
    data: Any, columns: Sequence[str] | None, options: Mapping[str, Any] | None
) -> Source | None:
    paths = paths_in(data)
    if paths and all(str(path).endswith(tars.ENDING) for path in paths):
        return tars.open_tars(paths, columns, options)
    return None


def _delta(
    data: Any, columns: Sequence[str] | None, options: Mapping[str, Any] | None
) -> Source | None:
    paths = paths_in(data)
    if _is_of(data, "deltalake", "DeltaTable") or (
        len(paths) == 1 and delta.is_table(paths[0], options)
    ):
        return delta.open_delta(paths[0] if paths else data, columns, options)
    return None


def _iceberg(
    data: Any, columns: Sequence[str] | None, options: Mapping[str, Any] | None
) -> Source | None:
    is_table = _is_of(data, "pyiceberg", "Table")
    return iceberg.open_iceberg(data, columns) if is_table else None


def _arrow_dataset(
    data: Any, columns: Sequence[str] | None, options: Mapping[str, Any] | None
) -> Source | None:
    is_dataset = _is_of(data, "pyarrow", "Dataset")
    return arrow_dataset.open_dataset(data, columns) if is_dataset else None


def _is_of(data: Any, package: str, name: str) -> bool:
    """Return whether something is of a class of that package, which need not be there."""
    return any(
        one.__name__ == name and one.__module__.partition(".")[0] == package
        for one in type(data).__mro__
    )


# The first that returns a source has it: what is a folder too stands before folders.
KINDS: tuple[Opener, ...] = (_tars, _delta, _iceberg, _arrow_dataset, _folder)


def open_source(
    data: Any, columns: Sequence[str] | None, options: Mapping[str, Any] | None
) -> Source | None:
    """Return the source of paths, URLs or tables; None for anything else. Collective.

    Args:
        data: As given to `nbdist.loader`.
        columns: Names of the columns to read; None for all.
        options: For the filesystem behind a URL, as fsspec takes them.
    """
    for kind in KINDS:
        source = kind(data, columns, options)
        if source is not None:
            return source
    return None
