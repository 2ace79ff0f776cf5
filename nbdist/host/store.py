"""Host the store through which ranks find each other (torch's TCPStore), and do nothing else.

A process of its own, outside the ranks and the notebook's kernel: a store hosted by rank 0 dies
with rank 0, and with it every way to form the group again. The listening socket is made and
bound by the one who starts the store, so that it listens on the chosen interface alone; TCPStore
by itself binds to every interface of the machine. The store asks for no password: bound to
loopback, it serves this machine's users only.
"""

import json
import os
import socket
import sys
from typing import Any

from nbdist.shared.processes import lifeline, name_servers


def serve(listener: socket.socket) -> Any:
    """Answer on `listener` until the returned object is dropped; torch's own thread does it.

    Args:
        listener: Bound and listening. It belongs to the store from here on.

    Returns:
        The `torch.distributed.TCPStore`.
    """
    from torch.distributed import TCPStore

    host, port = listener.getsockname()[:2]
    return TCPStore(
        host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def run(listener: socket.socket, kernel_pid: int) -> None:
    """Serve until the notebook's kernel has ended. The caller leads its own process session."""
    name_servers.wait_briefly()
    store = serve(listener)
    lifeline.wait_for_end(kernel_pid)
    del store


def main(argv: list[str]) -> None:
    """Run as a fresh interpreter: `python -m nbdist.host.store '{"kernel_pid": 1}' FD`."""
    os.setsid() if os.getsid(0) != os.getpid() else None
    run(socket.socket(fileno=int(argv[1])), json.loads(argv[0])["kernel_pid"])


if __name__ == "__main__":
    main(sys.argv[1:])
