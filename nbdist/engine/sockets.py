"""Find and cut the sockets of gloo's pairs in this process, and touch no other.

gloo offers no way to end a collective: `ProcessGroupGloo.abort()` inherits a method that does
nothing (torch 2.11 to 2.15). A pair whose socket is shut down, however, fails at once, on both
ends, also while the main thread waits inside C++. A pair's socket is one whose local address is
our device's listener (the peer called us) or whose remote address is a peer's listener (we called
the peer). The store, ZMQ and DataLoader's sockets are neither.

Listeners must stay whole: gloo answers a failing `accept` by ending the process.
"""

import os
import socket
import stat
from collections.abc import Collection, Iterator
from contextlib import closing, suppress

Address = tuple[str, int]  # (IP address, port)


def listeners() -> set[Address]:
    """Return the address of every TCP socket on which this process listens."""
    return {_address(s.getsockname()) for s in _tcp_sockets() if _listens(s)}


def cut(own: Address, peers: Collection[Address]) -> int:
    """Shut down every connected socket of gloo in this process; returns how many.

    Callable from any thread, any number of times; takes about 5 us a descriptor.

    Args:
        own: Where this process's gloo device listens.
        peers: Where the other ranks' devices listen.
    """
    count = 0
    for s in _tcp_sockets():
        # A socket may be closed or lose its peer while we look at it: then it needs no cut.
        with suppress(OSError):
            if _listens(s):
                continue
            remote = _address(s.getpeername())
            if _address(s.getsockname()) == own or remote in peers:
                s.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _tcp_sockets() -> Iterator[socket.socket]:
    # /proc/self/fd on Linux, which /dev/fd points to; a directory of its own on macOS.
    for name in os.listdir("/dev/fd"):
        # The directory's own descriptor is in the list and closed by now; others may follow.
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            # A duplicate: the number may be closed and taken again while we hold it.
            with closing(socket.socket(fileno=os.dup(int(name)))) as s:
                internet = s.family in (socket.AF_INET, socket.AF_INET6)
                if internet and s.type == socket.SOCK_STREAM:
                    yield s


def _listens(s: socket.socket) -> bool:
    return bool(s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _address(sockname: tuple[str, int]) -> Address:
    # An IPv6 name has four parts, and may hold an IPv4 address.
    return sockname[0].removeprefix("::ffff:"), sockname[1]
