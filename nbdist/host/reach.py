"""Find out which addresses of other hosts can be reached from here, by TCP.

On free ports, as gloo and ipyparallel use them: a firewall that lets only some through shows here,
in seconds, and not in five time-outs of gloo.
"""

import errno
import selectors
import socket
import time
from collections.abc import Iterable, Mapping, Sequence

_WAITING = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)


def listen(addresses: Iterable[str]) -> tuple[list[socket.socket], dict[str, int]]:
    """Listen on a free port of each address; return the sockets, and the ports by address."""
    sockets, ports = [], {}
    for address in addresses:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind((address, 0))
            listener.listen(1024)  # the system completes connections that are never accepted
        except OSError:
            listener.close()  # an address that went away, or of a link that is down
            continue
        sockets.append(listener)
        ports[address] = listener.getsockname()[1]
    return sockets, ports


def connect(
    targets: Mapping[str, Sequence[tuple[str, int]]], within_s: float
) -> dict[str, list[str]]:
    """Return by host the addresses that answered, all tried at once.

    Args:
        targets: By host, addresses with a port on which somebody listens.
        within_s: Longest wait for all of them together.
    """
    reached: dict[str, list[str]] = {host: [] for host in targets}
    deadline = time.monotonic() + within_s
    with selectors.DefaultSelector() as selector:
        for host, places in targets.items():
            for address, port in places:
                attempt = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                attempt.setblocking(False)
                if attempt.connect_ex((address, port)) in _WAITING:
                    selector.register(attempt, selectors.EVENT_WRITE, (host, address))
                else:
                    attempt.close()
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                attempt = key.fileobj  # type: ignore[assignment]
                host, address = key.data
                if not attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    reached[host].append(address)
                selector.unregister(attempt)
                attempt.close()
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return reached
