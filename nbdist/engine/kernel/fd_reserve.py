"""File descriptors kept back for recoveries.

A cell that opens files until there are no more fails by that; letting go of the peers and forming
the group anew takes descriptors too, for gloo's sockets. These are given up for it, and taken anew.
"""

import os
import threading
from contextlib import suppress
from typing import Final

COUNT: Final = 32

_held: list[int] = []
_lock = threading.Lock()


def fill() -> None:
    """Hold `COUNT` descriptors, or as many as there are."""
    with _lock, suppress(OSError):
        if not _held:
            _held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        while len(_held) < COUNT:
            _held.append(os.dup(_held[0]))


def release() -> None:
    """Give them up, until the next `fill`. Any thread."""
    with _lock:
        while _held:
            os.close(_held.pop())
