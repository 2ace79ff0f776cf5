"""What Linux tells of a connection, read from a real one on loopback."""

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from nbdist.engine.group.links import tcp_info

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's struct tcp_info")

Ends = tuple[socket.socket, socket.socket]


@contextmanager
def connection() -> Iterator[Ends]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = socket.create_connection(server.getsockname())
        called, _ = server.accept()
        with caller, called:
            yield caller, called


@pytest.fixture
def ends() -> Iterator[Ends]:
    with connection() as made:
        yield made


def send(caller: socket.socket, called: socket.socket, size: int) -> None:
    left = size
    caller.setblocking(False)
    sent = 0
    while left:
        if sent < size:
            with suppress(BlockingIOError):
                sent += caller.send(b"x" * min(65536, size - sent))
        left -= len(called.recv(1 << 20))


def test_bytes_round_trip_and_time_are_those_of_the_connection() -> None:
    began = time.monotonic()
    with connection() as (caller, called):
        send(caller, called, 1_000_000)
        while (told := tcp_info.read(caller)) is None or told.sent_bytes < 1_000_000:
            assert time.monotonic() < began + 30
        received = tcp_info.read(called)
    lasted_s = time.monotonic() - began
    assert received is not None
    assert told.sent_bytes == pytest.approx(1_000_000, abs=1)  # Linux counts the SYN
    assert received.received_bytes == 1_000_000
    assert told.received_bytes == received.sent_bytes == 0
    assert 0 < told.rtt_s <= lasted_s
    assert 0 <= told.busy_s <= lasted_s + 0.004  # the kernel counts in ticks of so long


def seconds_to_send(ends: Ends) -> float:
    began = time.monotonic()
    send(*ends, 1_000_000)
    return time.monotonic() - began


def test_a_paced_connection_takes_as_long_as_its_rate_says_and_is_busy_meanwhile(
    ends: Ends,
) -> None:
    caller, _ = ends
    tcp_info.pace(caller, 4e6)
    before = tcp_info.read(caller)
    took_s = seconds_to_send(ends)
    after = tcp_info.read(caller)
    assert before is not None
    assert after is not None
    assert took_s > 0.15  # the first window goes at once
    # Not while the process that fills it waits for a core; Linux counts ticks of some ms.
    assert took_s / 3 < after.busy_s - before.busy_s < 1.2 * took_s
    tcp_info.pace(caller, None)
    assert min(seconds_to_send(ends) for _ in range(3)) < took_s / 2


def quiet_s(end: socket.socket) -> float:
    told = tcp_info.read(end)
    assert told is not None
    return told.quiet_s


def test_a_connection_is_quiet_while_no_byte_comes_and_none_that_is_there_goes(ends: Ends) -> None:
    time.sleep(0.3)
    assert min(map(quiet_s, ends)) > 0.25
    caller, called = ends
    tcp_info.pace(caller, 1e6)
    caller.setblocking(False)
    caller.send(b"x" * 2_000_000)
    for _ in range(10):
        time.sleep(0.1)
        assert max(map(quiet_s, ends)) < 0.25, "65 kB packets at 1 MB/s"
        called.recv(1 << 20)
    tcp_info.pace(caller, 1)
    time.sleep(0.5)
    assert min(map(quiet_s, ends)) > 0.25


def test_an_older_kernels_answer_and_a_closed_socket_tell_nothing(ends: Ends) -> None:
    assert tcp_info.parse(b"\0" * 104) is None
    ends[0].close()
    assert tcp_info.read(ends[0]) is None
