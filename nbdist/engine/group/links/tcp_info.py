"""Read Linux's counters of a TCP connection (`struct tcp_info` of linux/tcp.h), and its pacing.

Neither needs a privilege. Elsewhere `read` returns None and `pace` raises OSError.
"""

import socket
import struct
import sys
from dataclasses import dataclass

_OPTION = getattr(socket, "TCP_INFO", 11)
_SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; Python has no name for it
_UNLIMITED = 2**64 - 1
_SIZE = 240  # of Linux 5.5 and later; a newer kernel's is longer, with the same beginning

# Offsets are those of linux/tcp.h; the struct only grows at its end.
_IN_FLIGHT = struct.Struct("=24xI")  # segments that the peer has not acknowledged
_SINCE = struct.Struct("=52xII")  # ms, since the peer's last bytes, and its last acknowledgement
_RTT = struct.Struct("=68xI")  # us, smoothed
_BYTES = struct.Struct("=120xQQ")  # acknowledged by the peer, received from it
_NOT_SENT = struct.Struct("=144xI")  # bytes that wait in the socket
_TIMES = struct.Struct("=168xQQ")  # us: with something to send, and held up by the peer's window
_RESENT = struct.Struct("=208xQ")
_LEAST = 216


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts since the connection was made; `rtt_s` is the present one.

    `quiet_s` is for how long no byte has come, nor gone where there are some to send.

    `busy_s` is how long there was something to send, or to be acknowledged, without the time in
    which the peer had no room for more: then the peer's program is slow and not the link. The
    kernel counts it in ticks of its clock (1 to 10 ms), right on average.
    """

    sent_bytes: int
    received_bytes: int
    busy_s: float
    resent_bytes: int
    rtt_s: float
    quiet_s: float


def read(s: socket.socket) -> Counts | None:
    """Return the counts of a connection; None where the system does not count. Takes 1 us."""
    if sys.platform != "linux":
        return None
    try:
        return parse(s.getsockopt(socket.IPPROTO_TCP, _OPTION, _SIZE))
    except OSError:
        return None  # it has just been closed


def parse(raw: bytes) -> Counts | None:
    """Return what a `struct tcp_info` says; None where it is of an older Linux."""
    if len(raw) < _LEAST:
        return None
    (in_flight,), (not_sent,) = _IN_FLIGHT.unpack_from(raw), _NOT_SENT.unpack_from(raw)
    came_ms, acked_ms = _SINCE.unpack_from(raw)
    quiet_ms = min(came_ms, acked_ms) if in_flight or not_sent else came_ms
    (rtt_us,) = _RTT.unpack_from(raw)
    acked, received = _BYTES.unpack_from(raw)
    busy_us, no_room_us = _TIMES.unpack_from(raw)
    (resent,) = _RESENT.unpack_from(raw)
    busy_s = max(0, busy_us - no_room_us) / 1e6
    return Counts(acked, received, busy_s, resent, rtt_us / 1e6, quiet_ms / 1e3)


def pace(s: socket.socket, bytes_per_s: float | None) -> None:
    """Let a connection send so many bytes a second at most; None lifts it.

    Linux' TCP paces by itself, on loopback too, whatever the queueing discipline is.

    Raises:
        OSError: This system cannot.
    """
    if sys.platform != "linux":
        raise OSError("only Linux paces TCP connections")
    rate = _UNLIMITED if bytes_per_s is None else max(1, int(bytes_per_s))
    s.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", rate))
