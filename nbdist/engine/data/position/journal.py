"""The journal: which positions of which epoch this rank was given, for `nbdist.coverage`.

Run lengths: batches that follow each other, with equal parts, are one entry. A rank writes it in
memory and in a small mapped file of the session's folder on its host, which outlives SIGKILL: a
replacement rank goes on with its predecessor's, and the lowest rank of a host takes over those of
ranks that have left. After a fault what was given beyond the step boundary goes (`cut`).

Each batch that a loop over a loader is given has a *serial*, the same on all ranks; so ranks that
get the same part by design (tp, pp, cp) are told from a sample given twice.

    header  magic, entries                                   int64[2]
    entry   loader, kind, serial, epoch, start, size, batches,
            offset, length, shard, shards                    int64[11]

Threads: the loop's.
"""

import logging
import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from nbdist.engine.data.batches import Shard

MAX_ENTRIES = 16_384  # 1.4 MB; the oldest go first
_FORGET = MAX_ENTRIES // 4  # at once, when it is full
_MAGIC = 0x6E6264_01
_HEADER = struct.Struct("<2q")
_ENTRY = struct.Struct("<11q")
_BATCHES_AT = 6 * 8  # bytes before `batches` in an entry

GIVEN, LEFT_OUT, SKIPPED, BEFORE, OVER, FORGOTTEN = range(6)

_log = logging.getLogger("nbdist.data")


class JournalEntry(NamedTuple):
    """`batches` of `size` samples from position `start` on, and this rank's part of each.

    The part begins `offset` samples into its batch and has `length`; the first batch is number
    `serial` of the loader. What is left out or skipped, or was given before the session (`kind`),
    is one batch, and `serial` is how many were given by then; `OVER` has the epoch's samples in
    `start`.
    """

    loader: int
    kind: int
    serial: int
    epoch: int
    start: int
    size: int
    batches: int = 1
    offset: int = 0
    length: int = 0
    shard: int = 0
    shards: int = 1


class SampleJournal:
    """This process's: the entries of all its loaders, in the order of giving."""

    def __init__(self) -> None:
        self._entries: list[JournalEntry] = []
        self._newest: dict[int, int] = {}  # by loader, the index of its last entry
        self._file: mmap.mmap | None = None

    def entries(self) -> list[JournalEntry]:
        """Return all entries, oldest first."""
        return list(self._entries)

    def give(
        self, loader: int, serial: int, epoch: int, batch: range, part: range, shard: Shard
    ) -> None:
        """Note that a loop gets `part` of the global batch `batch` (ranges of positions)."""
        at = self._newest.get(loader)
        offset, size = part.start - batch.start, len(batch)
        if at is not None:
            last = self._entries[at]
            if (
                last.serial + last.batches == serial
                and last.start + last.size * last.batches == batch.start
                and (last.kind, last.epoch, last.size) == (GIVEN, epoch, size)
                and (last.offset, last.length) == (offset, len(part))
                and (last.shard, last.shards) == (shard.index, shard.count)
            ):
                self._entries[at] = last._replace(batches=last.batches + 1)
                if self._file is not None:
                    place = _HEADER.size + at * _ENTRY.size + _BATCHES_AT
                    struct.pack_into("<q", self._file, place, last.batches + 1)
                return
        self.add(
            JournalEntry(
                loader,
                GIVEN,
                serial,
                epoch,
                batch.start,
                size,
                1,
                offset,
                len(part),
                shard.index,
                shard.count,
            )
        )

    def add(self, entry: JournalEntry) -> None:
        """Note something else, or the first of a run."""
        if len(self._entries) >= MAX_ENTRIES:
            self._set(_without_oldest(self._entries))
        at = len(self._entries)
        self._entries.append(entry)
        self._newest[entry.loader] = at
        if self._file is not None:
            _ENTRY.pack_into(self._file, _HEADER.size + at * _ENTRY.size, *entry)
            _HEADER.pack_into(self._file, 0, _MAGIC, at + 1)  # last: half an entry never counts

    def cut(self, loader: int, serial: int) -> None:
        """Forget what `loader` was given from batch number `serial` on: it has gone back."""
        at = self._newest.get(loader)
        if at is None or _next_serial(self._entries[at]) <= serial:
            return
        kept = []
        for entry in self._entries:
            if entry.loader == loader and _next_serial(entry) > serial:
                if entry.kind != GIVEN or entry.serial >= serial:
                    continue
                entry = entry._replace(batches=serial - entry.serial)
            kept.append(entry)
        self._set(kept)

    def put_back(self, entries: list[JournalEntry]) -> None:
        """Have the entries that it had when these were returned."""
        self._set(entries)

    def forget(self, loader: int) -> None:
        """Forget all of a loader."""
        if loader in self._newest:
            self._set([entry for entry in self._entries if entry.loader != loader])

    def keep_in(self, path: Path, *, is_new: bool) -> None:
        """Keep the entries in a file from now on.

        Args:
            path: Of the file; it is made where there is none.
            is_new: What is in it is another cluster's. Else its entries come first: this process
                takes the place of the one that wrote them.
        """
        found = [] if is_new else read(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = _HEADER.size + MAX_ENTRIES * _ENTRY.size
            os.ftruncate(descriptor, size)  # sparse: it takes what was written
            self._file = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._set([*found, *self._entries])

    def take_over(self, folder: Path, pattern: str, ranks: int) -> None:
        """Take over what ranks from `ranks` on have noted, which have left, and their files."""
        for path in sorted(folder.glob(pattern.format("*"))):
            if int(path.name.rpartition("-")[2]) >= ranks:
                self._set([*read(path), *self._entries])
                path.unlink(missing_ok=True)  # another host may see the same folder

    def _set(self, entries: list[JournalEntry]) -> None:
        self._entries = entries[-MAX_ENTRIES:]
        self._newest = {entry.loader: at for at, entry in enumerate(self._entries)}
        if self._file is None:
            return
        _HEADER.pack_into(self._file, 0, _MAGIC, 0)
        for at, entry in enumerate(self._entries):
            _ENTRY.pack_into(self._file, _HEADER.size + at * _ENTRY.size, *entry)
        _HEADER.pack_into(self._file, 0, _MAGIC, len(self._entries))


def read(path: Path) -> list[JournalEntry]:
    """Return the entries of a file; none where it is not there, or is no journal."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    if len(content) < _HEADER.size:
        return []
    magic, count = _HEADER.unpack_from(content)
    end = _HEADER.size + count * _ENTRY.size
    if magic != _MAGIC or not 0 <= end <= len(content):
        _log.warning("%s is no journal of nbdist: coverage goes on without it", path)
        return []
    return [JournalEntry(*fields) for fields in _ENTRY.iter_unpack(content[_HEADER.size : end])]


def _next_serial(entry: JournalEntry) -> int:
    """Return how many batches a loader must have given for the entry to be whole."""
    return entry.serial + (entry.batches if entry.kind == GIVEN else 0)


def _without_oldest(entries: list[JournalEntry]) -> list[JournalEntry]:
    """Return the entries without the oldest, and which epochs are no longer whole."""
    epochs: dict[int, int] = {}
    for entry in entries[:_FORGET]:
        epochs[entry.loader] = max(entry.epoch, epochs.get(entry.loader, 0))
    marks: Iterable[JournalEntry] = (
        JournalEntry(loader, FORGOTTEN, -1, epoch, 0, 0) for loader, epoch in epochs.items()
    )
    return [*marks, *entries[_FORGET:]]


_here = SampleJournal()


def here() -> SampleJournal:
    """Return this process's journal."""
    return _here
