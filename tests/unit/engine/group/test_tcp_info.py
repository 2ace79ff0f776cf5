"""What Linux tells of a connection, read from a real one on loopback."""

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from nbdist.engine.group import tcp_info

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's struct tcp_info")


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = socket.create_connection(server.getsockname())
        called, _ = server.accept()
        with caller, called:
            yield caller, called


def send(caller: socket.socket, called: socket.socket, size: int) -> None:
    left = size
    caller.setblocking(False)
    sent = 0
    while left:
        if sent < size:
            with suppress(BlockingIOError):
                sent += caller.send(b"x" * min(65536, size - sent))
        left -= len(called.recv(1 << 20))


def test_bytes_round_trip_and_time_are_those_of_the_connection(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    caller, called = ends
    send(caller, called, 1_000_000)
    deadline = time.monotonic() + 5
    while (told := tcp_info.read(caller)) is None or told.sent_bytes < 1_000_000:
        assert time.monotonic() < deadline
    received = tcp_info.read(called)
    assert received is not None
    assert told.sent_bytes == pytest.approx(1_000_000, abs=1)  # Linux counts the SYN
    assert received.received_bytes == 1_000_000
    assert told.received_bytes == received.sent_bytes == 0
    assert 0 < told.rtt_s < 1
    assert 0 <= told.busy_s < 5


def test_a_paced_connection_takes_as_long_as_its_rate_says_and_is_busy_meanwhile(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    caller, called = ends
    tcp_info.pace(caller, 4e6)
    before = tcp_info.read(caller)
    began = time.monotonic()
    send(caller, called, 1_000_000)
    took_s = time.monotonic() - began
    after = tcp_info.read(caller)
    assert before is not None
    assert after is not None
    assert took_s > 0.15  # the first window goes at once
    assert after.busy_s - before.busy_s == pytest.approx(took_s, abs=0.05)
    tcp_info.pace(caller, None)
    began = time.monotonic()
    send(caller, called, 1_000_000)
    assert time.monotonic() - began < 0.15


def test_an_older_kernels_answer_and_a_closed_socket_tell_nothing(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    assert tcp_info.parse(b"\0" * 104) is None
    ends[0].close()
    assert tcp_info.read(ends[0]) is None
