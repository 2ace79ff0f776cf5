"""How long a name server that does not answer is waited for, as glibc's own resolver has it."""

import ctypes
import os
import platform
import subprocess
import sys

import pytest

from nbdist.shared.processes import name_servers

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's resolver")


def waits() -> tuple[int, int]:
    """Return what `struct __res_state` of this thread begins with: `retrans` and `retry`."""
    state = ctypes.CDLL(None).__res_state
    state.restype = ctypes.POINTER(ctypes.c_int * 2)
    retrans, retry = state().contents
    return retrans, retry


def test_a_name_server_is_waited_for_a_second_and_afterwards_as_before() -> None:
    ctypes.CDLL(None).__res_init()
    before = waits()
    with name_servers.waiting_briefly():
        assert waits() == (1, 1)
    assert waits() == before != (1, 1)


def test_it_is_as_before_after_an_error_too() -> None:
    ctypes.CDLL(None).__res_init()
    before = waits()
    with pytest.raises(ValueError, match="refused"), name_servers.waiting_briefly():
        raise ValueError("refused")
    assert waits() == before


_LOOK_UP = """
import socket
from nbdist.shared.processes import name_servers
from tests.unit.shared.test_name_servers import waits
name_servers.wait_briefly()
socket.getnameinfo(("::ffff:127.0.0.1", 1), socket.NI_NUMERICSERV)
print(waits())
"""


@pytest.mark.parametrize(("chosen", "expected"), [(None, (1, 1)), ("timeout:3 attempts:4", (3, 4))])
def test_a_process_waits_a_second_unless_a_person_chose_otherwise(
    chosen: str | None, expected: tuple[int, int]
) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "RES_OPTIONS"}
    if chosen is not None:
        environment["RES_OPTIONS"] = chosen
    command = [sys.executable, "-c", _LOOK_UP]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.stdout == f"{expected}\n", ran.stderr
