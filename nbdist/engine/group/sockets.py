"""Find the sockets of gloo's pairs in this process, to hold, end or query them; touch no other.

A pair's socket is one whose local address is our device's listener (the peer called us) or whose
remote address is a peer's listener (we called the peer). The store, ZMQ and DataLoader's sockets
are neither. Listeners must stay whole: gloo answers a failing `accept` by ending the process.
"""

import os
import socket
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TypeVar

Address = tuple[str, int]  # (IP address, port)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GlooPair:
    """A connection of gloo's to another rank: the `number` of its descriptor, gloo's own.

    `peer` is the rank that we called; None where we were called, for a caller's address says
    nothing of its rank. `caller` is the caller's address, the same at both ends.
    """

    number: int
    family: int
    caller: Address
    peer: int | None

    def use(self, do: Callable[[socket.socket], T]) -> T | None:
        """Return what `do` returns for gloo's own socket; None if gloo has closed it."""
        try:
            # No duplicate: with family and type given, this takes the number as it is.
            s = socket.socket(self.family, socket.SOCK_STREAM, fileno=self.number)
        except OSError:
            return None
        try:
            return do(s) if self._is_still(s) else None
        finally:
            s.detach()

    def _is_still(self, s: socket.socket) -> bool:
        # The number may be another's by now.
        with suppress(OSError):
            end = s.getpeername() if self.peer is None else s.getsockname()
            return _address(end) == self.caller
        return False


def listeners() -> set[Address]:
    """Return the address of every TCP socket on which this process listens."""
    return {_address(s.getsockname()) for s in _tcp_sockets() if _listens(s)}


def pairs(own: Address, peers: Mapping[int, Address]) -> list[GlooPair]:
    """Return gloo's connections here. Callable from any thread; takes about 5 us a descriptor.

    Args:
        own: Where this process's gloo device listens.
        peers: Where the other ranks' devices listen, by rank.
    """
    ranks = {address: rank for rank, address in peers.items()}
    found: dict[tuple[Address, int | None], GlooPair] = {}
    for number, s in _numbered():
        with suppress(OSError):  # as in `hold`
            if _listens(s):
                continue
            local, remote = _address(s.getsockname()), _address(s.getpeername())
            if remote in ranks:
                pair = GlooPair(number, s.family, local, ranks[remote])
            elif local == own:
                pair = GlooPair(number, s.family, remote, None)
            else:
                continue
            found.setdefault((pair.caller, pair.peer), pair)  # `hold` makes duplicates
    return list(found.values())


def hold(own: Address, peers: Collection[Address], held: Collection[int]) -> list[int]:
    """Return a duplicate descriptor of every connected socket of gloo here, but those held.

    While it is open, gloo may close its own and the peer sees nothing of it. Callable from any
    thread; takes about 5 us a descriptor.

    Args:
        own: Where this process's gloo device listens.
        peers: Where the other ranks' devices listen.
        held: What earlier calls returned and is not closed yet.
    """
    done: list[int] = []
    for s in _tcp_sockets(but=held):
        # A socket may be closed or lose its peer while we look at it: then there is none to hold.
        with suppress(OSError):
            if _listens(s):
                continue
            remote = _address(s.getpeername())
            if _address(s.getsockname()) == own or remote in peers:
                # Not s.dup(): it makes the socket blocking, gloo's own as well, and gloo's event
                # loop would block in its next read.
                done.append(os.dup(s.fileno()))
    return done


def end_reading(held: Collection[int]) -> None:
    """Make readers of these sockets find the end of the stream."""
    for number in held:
        s = socket.socket(fileno=number)
        with suppress(OSError):  # the peer is gone already
            s.shutdown(socket.SHUT_RD)
        s.detach()


def _tcp_sockets(but: Collection[int] = ()) -> Iterator[socket.socket]:
    return (s for _, s in _numbered(but))


def _numbered(but: Collection[int] = ()) -> Iterator[tuple[int, socket.socket]]:
    """Go through the process's TCP sockets: their numbers, and a duplicate of each for a while."""
    # /proc/self/fd on Linux, which /dev/fd points to; a directory of its own on macOS.
    for name in os.listdir("/dev/fd"):
        # The directory's own descriptor is in the list and closed by now; others may follow.
        with suppress(OSError):
            if int(name) in but or not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            # A duplicate: the number may be closed and taken again while we hold it.
            with closing(socket.socket(fileno=os.dup(int(name)))) as s:
                internet = s.family in (socket.AF_INET, socket.AF_INET6)
                if internet and s.type == socket.SOCK_STREAM:
                    yield int(name), s


def _listens(s: socket.socket) -> bool:
    return bool(s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _address(sockname: tuple[str, int]) -> Address:
    # An IPv6 name has four parts, and may hold an IPv4 address.
    return sockname[0].removeprefix("::ffff:"), sockname[1]
