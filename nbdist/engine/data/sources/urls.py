"""fsspec, for the sources: what a path or URL names, in words where it names nothing.

Any thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from nbdist.shared.error_text import named
from nbdist.shared.errors import DataError, NBDistError, UsageError, install

_PATTERN = "*?["


@dataclass(frozen=True, slots=True)
class Listed:
    """A file that is there: its path as its filesystem calls it, and the path below its root."""

    path: str
    name: str
    size_bytes: int


def filesystem(url: str, options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """Return fsspec's filesystem of a URL, and its path there.

    Raises:
        UsageError: fsspec knows no such URL, or the package for it is missing.
    """
    import fsspec  # type: ignore[import-untyped]

    try:
        return fsspec.core.url_to_fs(url, **(options or {}))  # type: ignore[no-any-return]
    except (ImportError, ValueError, TypeError) as error:
        raise UsageError(
            f"{url} cannot be opened.",
            why=str(error),
            do="install fsspec's package for it (s3fs, gcsfs, adlfs) where the ranks run, and "
            "give its options as storage_options=",
        ) from error


def files(fs: Any, path: str, endings: tuple[str, ...]) -> list[Listed]:
    """Return the files that a folder, a pattern or a file's path names, in the order of names.

    In folders, and in folders in them, only those with one of the `endings` count, and none whose
    name, or whose folder's, begins with `_` or `.`: by convention these are no data.

    Raises:
        DataError: There is nothing, or no file that counts.
    """
    is_pattern = any(sign in path for sign in _PATTERN)
    try:
        found: dict[str, Any] = (
            fs.glob(path, detail=True) if is_pattern else fs.find(path, detail=True)
        )
        is_there = bool(found) or (not is_pattern and fs.exists(path))
    except Exception as error:
        raise reason(error, path) from error
    root = (
        _root(path, found) if is_pattern or path not in found else str(PurePosixPath(path).parent)
    )
    listed = [
        Listed(one, PurePosixPath(one).relative_to(root).as_posix(), int(about["size"] or 0))
        for one, about in sorted(found.items())
        if about["type"] == "file"
    ]
    if not is_pattern and path not in found:
        listed = [one for one in listed if _is_data(one.name, endings)]
    if listed:
        return listed
    if is_pattern or not is_there:
        raise DataError(
            f"{'No file matches' if is_pattern else 'There is no'} {path}.",
            why="a relative path begins in the folder of the notebook's ranks",
            do="check the path; ranks on several machines need one that all of them see",
        )
    raise DataError(
        f"{path} has no {' or '.join(endings)} file.",
        do="name the folder of the files; of WebDataset's tars a pattern, such as folder/*.tar",
    )


def open_file(fs: Any, path: str) -> Any:
    """Return a file to read, for pyarrow; of this machine's it reads them by itself."""
    import pyarrow

    if is_local(fs):
        return pyarrow.OSFile(path)
    # Arrow knows which ranges it wants: what fsspec would read beyond them is not used.
    return fs.open(path, "rb", cache_type="none")


def is_far(file: Any) -> bool:
    """Return whether each read of a file that is open costs a request: then few, large ones pay."""
    import pyarrow

    return not isinstance(file, pyarrow.NativeFile)


def open_below(fs: Any, root: str, path: str) -> Any:
    """Return a file below a folder, as `open_file`."""
    return open_file(fs, f"{root}/{path}")


def is_local(fs: Any) -> bool:
    """Return whether a filesystem is this machine's."""
    return "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


def _root(path: str, found: Mapping[str, Any]) -> str:
    """Return the folder below which names count: that before the first pattern sign."""
    plain = []
    for part in PurePosixPath(path).parts:
        if any(sign in part for sign in _PATTERN):
            break
        plain.append(part)
    return str(PurePosixPath(*plain)) if plain else ""


def _is_data(name: str, endings: tuple[str, ...]) -> bool:
    parts = PurePosixPath(name).parts
    return name.endswith(endings) and not any(part.startswith(("_", ".")) for part in parts)


def reason(error: Exception, path: str, gone: str = "") -> NBDistError:
    """Return why something could not be read, in words, and what to do; `gone`: of what is gone."""
    if isinstance(error, NBDistError):
        return error
    if isinstance(error, ImportError):
        return UsageError(
            f"{path} cannot be read: {error}.", do=f"{install('data')}, where the ranks run"
        )
    if isinstance(error, FileNotFoundError):
        do = gone or "put it back, then %dist retry"
        return DataError(f"{path} is not there.", why="it was moved or deleted", do=do)
    if isinstance(error, PermissionError):
        do = "let this account read it, then %dist retry"
        return DataError(f"{path} may not be read by this account.", why=str(error), do=do)
    do = "write or copy it once more, in the same size and grouping, then %dist retry"
    return DataError(f"{path} could not be read.", why=named(error), do=do)
