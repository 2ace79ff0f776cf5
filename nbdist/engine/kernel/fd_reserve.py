"""File descriptors reserved for recoveries.

A cell that opens files until none is left fails; aborting and re-creating the group need
descriptors too, for gloo's sockets. The reserved ones are released for that, and taken again.
"""

import os
import threading
from contextlib import suppress
from typing import Final

COUNT: Final = 32


class DescriptorReserve:
    """The reserved descriptors."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._lock = threading.Lock()

    def fill(self) -> None:
        """Hold `COUNT` descriptors, or as many as are free."""
        with self._lock, suppress(OSError):
            if not self._held:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            while len(self._held) < COUNT:
                self._held.append(os.dup(self._held[0]))

    def release(self) -> None:
        """Release them, until the next `fill`. Any thread."""
        with self._lock:
            while self._held:
                os.close(self._held.pop())


here = DescriptorReserve()
