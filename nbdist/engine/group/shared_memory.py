"""Memory that the ranks of one host share, without a name that could be left behind.

Rank 0 makes it and sends the others an `Offer`: the path of its own descriptor
(`/proc/PID/fd/N`): a kill -9 at any moment leaves nothing. Where the system has no such memory
(macOS) it is a file, removed as soon as all have mapped it. Only the same user may open either, and
a random token shows whether the right file was opened.

It begins with one page for the token; what `Offered` and `accept` return begins behind it.
"""

import contextlib
import logging
import mmap
import os
import secrets
import socket
import tempfile
from dataclasses import dataclass

log = logging.getLogger(__name__)

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Offer:
    """The path to memory of another process."""

    host: str
    path: str
    token: str
    size_bytes: int


class Offered:
    """Memory that others may map, as long as this is not closed."""

    def __init__(self, size_bytes: int) -> None:
        """Make `size_bytes` of zeros.

        Raises:
            OSError: There is no memory for it, or no descriptor.
        """
        self._file = ""
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("nbdist", os.MFD_CLOEXEC)
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        else:
            self._descriptor, self._file = tempfile.mkstemp(prefix="nbdist-")
            path = self._file
        try:
            os.fchmod(self._descriptor, 0o600)
            token = secrets.token_bytes(16)
            # Written, not just extended: a page that cannot be allocated later would end the
            # process.
            os.pwrite(self._descriptor, token.ljust(_PAGE + size_bytes, b"\0"), 0)
        except BaseException:
            self.close()
            raise
        self.offer = Offer(socket.gethostname(), path, token.hex(), size_bytes)

    def close(self) -> None:
        """Close it: what has been mapped stays; no one can map it any longer."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if self._file:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._file)


def accept(offer: Offer) -> memoryview | None:
    """Map what was offered; None if it cannot be mapped: on another host, or closed by now."""
    if offer.host != socket.gethostname():
        return None
    try:
        # The path may lead anywhere when its owner has closed it; no open may wait.
        descriptor = os.open(offer.path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            memory = memoryview(mmap.mmap(descriptor, _PAGE + offer.size_bytes))
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        log.warning("No memory is shared with the ranks of this host: %s", error)
        return None
    if memory[:16].hex() != offer.token:
        return None
    return memory[_PAGE:]
