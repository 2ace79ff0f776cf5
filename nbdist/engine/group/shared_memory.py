"""Memory that the ranks of one host share, without a name that could be left behind.

Rank 0 makes it and tells the others, with an `Offer`, how to come to it through its own descriptor
(`/proc/PID/fd/N`): a kill -9 at any moment leaves nothing. Where the system knows no such memory
(macOS) it is a file, removed as soon as all have mapped it. Only the same user may open either, and
a random token tells whether what was opened is what was offered.

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
    """The way to memory that another process holds."""

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
            # Written, not just made long: a page that cannot be had later would end the process.
            os.pwrite(self._descriptor, token.ljust(_PAGE + size_bytes, b"\0"), 0)
        except BaseException:
            self.close()
            raise
        self.offer = Offer(socket.gethostname(), path, token.hex(), size_bytes)

    def close(self) -> None:
        """Let go: what has been mapped stays; nobody can map it any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if self._file:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._file)


def accept(offer: Offer) -> memoryview | None:
    """Map what was offered; None where that cannot be: on another host, or the offer is over."""
    if offer.host != socket.gethostname():
        return None
    try:
        # The path may lead anywhere when its owner has gone on meanwhile; no open may wait.
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
