"""WebDataset's tar files: files in a row that share a stem are a sample.

The headers are read once, when the loader is made, and noted beside the session. A group is some
samples in a row, of about `GROUP_BYTES`: one range of a tar, read at once. What a file holds is
decoded where batches are made, and not before.

While a loader is made; `read` on reader threads.
"""

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nbdist.engine.data import services
from nbdist.engine.data.sources import agreed, urls
from nbdist.engine.data.sources.source import Columns, fingerprint
from nbdist.shared.errors import DataError, UsageError

ENDING = ".tar"
KEY = "__key__"
GROUP_BYTES = 32 << 20
_BLOCK = 1 << 20  # read ahead in headers of a store


@dataclass(frozen=True, slots=True)
class _Group:
    """Samples in a row: from the first header to the end of the last file."""

    start: int
    stop: int
    samples: int


@dataclass(frozen=True, slots=True)
class _Index:
    """What the headers of one tar say."""

    groups: list[_Group]
    suffixes: list[str]


class TarSource:
    """The samples of tar files, by what their files are called behind the first dot."""

    def __init__(
        self, name: str, fs: Any, files: Sequence[urls.Listed], columns: Sequence[str] | None
    ) -> None:
        """Read the headers. Collective.

        Args:
            name: For messages.
            fs: fsspec's filesystem.
            files: The tars, in order.
            columns: Suffixes to read; None for all.

        Raises:
            DataError: One is no tar, or none has a sample.
            UsageError: A column that no sample has.
        """
        self.name, self._fs, self._files = name, fs, list(files)
        indexes = agreed.for_each(self._indexed, self._files, name)
        known = sorted({suffix for index in indexes for suffix in index.suffixes})
        missing = [column for column in columns or () if column not in (*known, KEY)]
        if missing:
            raise UsageError(f"{name} has no {missing[0]}.", do=f"it has {', '.join(known)}")
        self.columns = list(columns) if columns is not None else [KEY, *known]
        self._groups = [(n, group) for n, index in enumerate(indexes) for group in index.groups]
        if not self._groups:
            raise DataError(
                f"{name} has no sample.",
                why="a sample is files with one stem and an ending each, such as 07.jpg and 07.cls",
            )

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Samples of each group, int64[groups]."""
        return np.array([group.samples for _, group in self._groups], dtype=np.int64)

    @property
    def fingerprint(self) -> int:
        """A number that differs where the tars do."""
        return fingerprint([*((f.name, f.size_bytes) for f in self._files), self.sizes])

    @property
    def is_far(self) -> bool:
        """Whether the tars are in a store."""
        return not urls.is_local(self._fs)

    def where(self, group: int) -> str:
        """Return tar and bytes, for messages."""
        number, its = self._groups[group]
        return f"{self._files[number].name}, bytes {its.start:,} to {its.stop:,}"

    def read(self, group: int) -> Columns:
        """Return the bytes of a group's files by suffix, None where a sample has no such file."""
        number, its = self._groups[group]
        try:
            with self._fs.open(self._files[number].path, "rb", cache_type="none") as file:
                file.seek(its.start)
                content = file.read(its.stop - its.start)
            with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
                samples = [
                    {KEY: key, **{suffix: _bytes(tar, one) for suffix, one in files.items()}}
                    for key, files in _samples(tar)
                ]
        except Exception as error:
            raise urls.reason(error, f"{self.where(group)} of {self.name}") from error
        if len(samples) != its.samples:
            raise DataError(
                f"{self.where(group)} of {self.name} has {len(samples)} samples, and had "
                f"{its.samples} when the loader was made.",
                why="the tar was rewritten",
                do="make the loader again",
            )
        return {name: [sample.get(name) for sample in samples] for name in self.columns}

    def _indexed(self, file: urls.Listed) -> _Index:
        noted = _note_of(file, self._fs.info(file.path))
        if noted is not None and noted.exists():
            index = json.loads(noted.read_text("utf-8"))
            return _Index([_Group(**one) for one in index["groups"]], index["suffixes"])
        options = {"block_size": _BLOCK, "cache_type": "readahead"}
        with self._fs.open(file.path, "rb", **options) as opened:
            try:
                with tarfile.open(fileobj=opened, mode="r:") as tar:
                    index = _index(tar)
            except tarfile.ReadError as error:
                raise DataError(
                    f"{file.path} is no tar, or is cut short.",
                    why=str(error),
                    do="write it again; compressed tars (.tar.gz) have to be unpacked",
                ) from error
        if noted is not None:
            written = noted.with_suffix(f".{id(index)}")  # others may write it as well
            written.write_text(json.dumps(asdict(index)), "utf-8")
            written.replace(noted)
        return index


def _note_of(file: urls.Listed, about: Mapping[str, Any]) -> Path | None:
    folder = services.here.indexes
    if folder is None:
        return None
    # What tells another version of it, in the words of its filesystem.
    version = [str(about.get(key)) for key in ("mtime", "LastModified", "last_modified", "ETag")]
    if not any(one != "None" for one in version):
        return None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    identity = repr((file.path, file.size_bytes, version, GROUP_BYTES)).encode()
    return folder / f"{hashlib.blake2b(identity, digest_size=16).hexdigest()}.json"


def _index(tar: tarfile.TarFile) -> _Index:
    groups: list[_Group] = []
    suffixes: set[str] = set()
    start = stop = samples = 0
    for _, files in _samples(tar):
        members = list(files.values())
        first = min(one.offset for one in members)
        if samples and stop - start >= GROUP_BYTES:
            groups.append(_Group(start, stop, samples))
            samples = 0
        start = start if samples else first
        stop = max(_end(one) for one in members)
        samples += 1
        suffixes.update(files)
    if samples:
        groups.append(_Group(start, stop, samples))
    return _Index(groups, sorted(suffixes))


def _samples(tar: tarfile.TarFile) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Yield the samples: their key, and their files by suffix, as `webdataset` groups them."""
    key, files = "", dict[str, tarfile.TarInfo]()
    for one in tar:
        stem, suffix = _split(one.name)
        if not one.isreg() or not stem:
            continue
        if stem != key and files:
            yield key, files
            files = {}
        key = stem
        if suffix in files:
            raise tarfile.ReadError(f"{one.name} is there twice in one sample")
        files[suffix] = one
    if files:
        yield key, files


def _split(name: str) -> tuple[str, str]:
    """Return stem and suffix, from the first dot of the file's name on; "" for what is no data."""
    found = re.match(r"^((?:.*/|)[^./]+)[.]([^/]*)$", name)
    if found is None or (name.startswith("__") and name.endswith("__") and "/" not in name):
        return "", ""
    return found.group(1), found.group(2).lower()


def _end(one: tarfile.TarInfo) -> int:
    return one.offset_data + -(-one.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _bytes(tar: tarfile.TarFile, one: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(one)
    assert file is not None, "a regular file"
    content = file.read()
    if len(content) != one.size:
        raise tarfile.ReadError(f"{one.name} is cut short")
    return content


def open_tars(
    paths: Sequence[str | Path], columns: Sequence[str] | None, options: Mapping[str, Any] | None
) -> TarSource:
    """Return the samples of tar files. Collective.

    Args:
        paths: Files, patterns or URLs; `train-{000..099}.tar` is a hundred of them.
        columns: Suffixes to read; None for all.
        options: For fsspec.
    """
    name = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    every = [one for path in paths for one in braces(str(path))]
    opened = [urls.filesystem(one, options) for one in every]

    def listed() -> list[urls.Listed]:
        return [one for fs, path in opened for one in urls.files(fs, path, (ENDING,))]

    return TarSource(name, opened[0][0], agreed.from_rank_0(listed, name), columns)


def braces(path: str) -> list[str]:
    """Return the paths that `{000..099}` or `{a,b}` in one stands for, as shells and others do."""
    found = re.search(r"\{([^{}]*)\}", path)
    if found is None:
        return [path]
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    if numbers is None:
        chosen = found[1].split(",")
    else:
        width = len(numbers[1])
        chosen = [f"{n:0{width}}" for n in range(int(numbers[1]), int(numbers[2]) + 1)]
    before, after = path[: found.start()], path[found.end() :]
    return [one for each in chosen for one in braces(f"{before}{each}{after}")]
