"""File descriptors kept back for recoveries.

A cell that opens files until there are no more fails by that; letting go of the peers and forming
the group anew takes descriptors too, for gloo's sockets. These are given up for it, and taken anew.
"""

import os
import threading
from contextlib import suppress
from typing import Final

COUNT: Final = 32


class DescriptorReserve:
    """The descriptors that are held."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._lock = threading.Lock()

    def fill(self) -> None:
        """Hold `COUNT` descriptors, or as many as there are."""
        with self._lock, suppress(OSError):
            if not self._held:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            while len(self._held) < COUNT:
                self._held.append(os.dup(self._held[0]))

    def release(self) -> None:
        """Give them up, until the next `fill`. Any thread."""
        with self._lock:
            while self._held:
                os.close(self._held.pop())


here = DescriptorReserve()
