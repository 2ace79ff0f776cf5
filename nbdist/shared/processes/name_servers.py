"""How long a name server that does not answer may hold up torch's connections to its store.

c10d asks for the name of each address that it connects to or that connects to it, for messages
alone (`SocketImpl` in torch/csrc/distributed/c10d/socket.cpp). Where name servers do not answer, as
on nodes without a way out or behind a lost VPN, glibc waits twice 5 s for each; here once 1 s.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager


def wait_briefly() -> None:
    """Wait 1 s, once, in a process that has looked up no name yet; what a person chose stays."""
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # resolv.conf(5)


@contextmanager
def waiting_briefly() -> Iterator[None]:
    """Wait 1 s, once, on this thread in the block, and afterwards as before."""
    waits = _waits()
    if waits is None:
        yield
        return
    before = list(waits)
    waits[:] = [1, 1]
    try:
        yield
    finally:
        waits[:] = before


def _waits() -> "ctypes.Array[ctypes.c_int] | None":
    """Return this thread's `_res.retrans`, s, and `_res.retry` (resolver(3)); None if not glibc."""
    try:
        init, state = ctypes.CDLL(None).__res_init, ctypes.CDLL(None).__res_state
    except AttributeError:
        return None
    init()  # or the first lookup would set them again
    state.restype = ctypes.POINTER(ctypes.c_int * 2)
    waits: ctypes.Array[ctypes.c_int] = state().contents
    return waits
