"""The files behind a rank's output: the whole text of a cell, and what descriptors 1 and 2 write.

`stdio.py` decides when; nothing here knows of cells or messages. One thread at a time: its lock.
"""

import codecs
import io
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from nbdist.shared.text import without_noise

_TRIM_BYTES: Final = 64 * 1024 * 1024  # a file behind a descriptor is emptied when it is larger


class KeptText:
    """The file with the whole text of one cell, mode 0600; writes 64 KiB at a time."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self.broken = False
        self._pending: list[str] = []
        self._size = 0
        self._fd = -1

    def write(self, text: str) -> None:
        """Take `text`; raises OSError if the disk is full."""
        if self.broken:
            return
        self._pending.append(text)
        self._size += len(text)
        if self._size >= 65536:
            self._write_out()

    def _write_out(self) -> None:
        if self._fd < 0:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, 0o600)
        data = "".join(self._pending).encode(errors="replace")
        self._pending, self._size = [], 0
        write_all(self._fd, data)

    def finish(self) -> bool:
        """Write the rest and close; return whether the file holds everything."""
        try:
            if not self.broken:
                self._write_out()
        except OSError:
            self.broken = True  # the caller names no file then
        self.forget()
        return not self.broken

    def forget(self) -> None:
        """Close without writing the rest; in a forked child, the file is the parent's."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._pending, self.broken = -1, [], self.broken or bool(self._pending)


class WatchedFile:
    """A file that a descriptor writes to, and the place up to which it has been read."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self.write_fd = os.open(path, flags, 0o600)
        self._read_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._at = os.fstat(self._read_fd).st_size

    def read(self) -> Iterable[str]:
        """Yield the text that is new, in pieces."""
        size = os.fstat(self._read_fd).st_size
        if size == self._at:
            return
        self._at = min(self._at, size)  # another process has truncated the file
        while data := os.pread(self._read_fd, 1 << 20, self._at):
            self._at += len(data)
            yield without_noise(self._decoder.decode(data))
        if self._at > _TRIM_BYTES:
            # All writers append, so they continue at the beginning. What one writes between the
            # read above and this line is lost; the alternative is a disk that fills up.
            os.truncate(self.write_fd, 0)
            self._at = 0

    def close(self) -> None:
        """Close both descriptors; the file stays."""
        os.close(self.write_fd)
        os.close(self._read_fd)


class LogStream(io.TextIOBase):
    """The stream of a rank's own log; a full disk loses lines, nothing else.

    Without it, `logging` would print its own traceback for each of them, into the user's cell.
    """

    def __init__(self, descriptor: int) -> None:
        """Write to `descriptor`, which stays its owner's."""
        self._descriptor = descriptor

    def writable(self) -> bool:
        """Return True, as `io` asks."""
        return True

    def write(self, text: str) -> int:
        """Write `text`, or drop it."""
        with suppress(OSError):
            write_all(self._descriptor, text.encode(errors="replace"))
        return len(text)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`, however many calls it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
