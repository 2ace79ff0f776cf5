"""JSON lines over two descriptors: how a parent hears requests, and tells what happens."""

import json
import os
from typing import Any


class JsonLines:
    """One channel. Single-threaded: who reads is who writes."""

    def __init__(self, read: int, write: int) -> None:
        """Use two descriptors, which may be one socket's; they belong to the link."""
        self._read = read
        self._write = write
        self._unread = b""

    def fileno(self) -> int:
        """Return the descriptor to wait at."""
        return self._read

    def receive(self) -> list[dict[str, Any]]:
        """Return the requests that have arrived, at least one; none when the other end is gone."""
        while b"\n" not in self._unread:
            try:
                data = os.read(self._read, 1 << 16)
            except OSError:
                data = b""
            if not data:
                return []
            self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        return [json.loads(line) for line in lines]

    def send(self, **event: Any) -> None:
        """Tell the other end; nothing when it is gone, which `receive` tells."""
        line = json.dumps(event).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._write, line) :]
        except OSError:
            return

    def close(self) -> None:
        """Close it, in a child that has no use for it."""
        for descriptor in {self._read, self._write}:
            os.close(descriptor)


def over_stdio() -> JsonLines:
    """Return a link over standard input and output; what is printed goes to standard error."""
    link = JsonLines(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return link
