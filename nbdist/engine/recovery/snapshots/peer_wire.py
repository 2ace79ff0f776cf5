"""Bytes from one rank's memory into another's, on connections of their own.

    outbox of rank r                       inbox of its peer
    send(box, header, body)  ── whole messages, in order ──▶  two boxes of each name
    wait                     ◀── one byte: it is whole ──

Not a collective, and through no process group: two threads that share one crash. Both ends prove
that they know the session's key before anything is read. An inbox keeps the two newest whole
messages of each box: the next one is received over the older of them, and counts when it is whole.

Threads: `nbdist-peers-out` sends and `nbdist-peers-in` receives; all functions on the main thread.
Standard library only.
"""

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_log = logging.getLogger("nbdist.peers")
_NONCE_BYTES = 32
_HEAD = struct.Struct("!HQQ")  # bytes of the box's name, of the header, of the body
_FROM = struct.Struct("!I")  # the sender's rank
_HELLO_S = 10.0  # for both ends to prove who they are
_MOST_HEADER = 1 << 30
_NO_ROOM_S = 0.1
_ACK = b"\1"

Box = tuple[int, str]  # the sender's rank, and a name


@dataclass(slots=True)
class PeerMessage:
    """A whole message: bytes whose meaning is the sender's."""

    header: bytes
    body: bytearray


class Inbox:
    """Receives from whoever knows the key.

    Args:
        host: The address to listen on.
        key: The session's.
    """

    def __init__(self, host: str, key: bytes) -> None:
        self._key = key
        self._lock = threading.Lock()
        self._boxes: dict[Box, list[PeerMessage]] = {}
        self._socket = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        threading.Thread(target=self._serve, name="nbdist-peers-in", daemon=True).start()

    def all_held(self) -> dict[int, dict[str, list[PeerMessage]]]:
        """Return the whole messages by sender and box, the newest first."""
        found: dict[int, dict[str, list[PeerMessage]]] = {}
        with self._lock:
            for (sender, name), kept in self._boxes.items():
                found.setdefault(sender, {})[name] = kept[::-1]
        return found

    def held(self, rank: int) -> dict[str, list[PeerMessage]]:
        """Return the whole messages of a rank by their boxes, the newest first."""
        return self.all_held().get(rank, {})

    def drop(self, rank: int, is_dropped: Callable[[str, PeerMessage], bool]) -> None:
        """Forget messages of a rank, by their box and themselves."""
        with self._lock:
            for (sender, name), kept in self._boxes.items():
                if sender == rank:
                    kept[:] = [one for one in kept if not is_dropped(name, one)]

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return  # closed
                time.sleep(_NO_ROOM_S)  # this process has no descriptor left
                continue
            # One a connection: a sender that hangs must not keep its successor out.
            name = "nbdist-peers-in"
            threading.Thread(target=self._hear, args=(connection,), name=name, daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        try:
            with connection:
                _tune(connection)
                rank = _answer(connection, self._key)
                while True:
                    self._receive(connection, rank)
        except (OSError, ValueError) as error:
            _log.info("A peer's connection has ended: %s", error)

    def _receive(self, connection: socket.socket, rank: int) -> None:
        name_bytes, header_bytes, body_bytes = _HEAD.unpack(_exactly(connection, _HEAD.size))
        if header_bytes > _MOST_HEADER:
            raise ValueError("a header is too long")
        name = _exactly(connection, name_bytes).decode()
        header = bytes(_exactly(connection, header_bytes))
        body = self._room(rank, name, body_bytes)
        _fill(connection, memoryview(body))
        with self._lock:
            self._boxes.setdefault((rank, name), []).append(PeerMessage(header, body))
        connection.sendall(_ACK)

    def _room(self, rank: int, name: str, size: int) -> bytearray:
        """Return memory for the next message: that of the older of two, if it fits."""
        with self._lock:
            kept = self._boxes.setdefault((rank, name), [])
            while len(kept) > 1:
                oldest = kept.pop(0)
                if len(oldest.body) == size:
                    return oldest.body
        return bytearray(size)


class Outbox:
    """Sends to one peer, message after message.

    Args:
        rank: This rank.
        key: The session's.
    """

    def __init__(self, rank: int, key: bytes) -> None:
        self._rank, self._key = rank, key
        self._news = threading.Condition()
        self._waiting: list[tuple[str, bytes, Sequence[memoryview]]] = []
        self._under_way = 0
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._socket is not None

    def connect(self, address: tuple[str, int]) -> None:
        """Connect to an inbox.

        Raises:
            OSError: There is none, or it does not know the key.
        """
        connection = socket.create_connection(address, _HELLO_S)
        try:
            _tune(connection)
            _ask(connection, self._rank, self._key)
        except BaseException:
            connection.close()
            raise
        self._socket = connection

    def disconnect(self) -> None:
        """End the connection, and what is under way on it."""
        with self._news:
            connection, self._socket = self._socket, None
            self._waiting.clear()
        if connection is not None:
            _shut(connection)

    def send(self, box: str, header: bytes, body: Sequence[memoryview]) -> None:
        """Send a message, whose body must not change until `wait` says so."""
        with self._news:
            self._waiting.append((box, header, body))
            self._news.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nbdist-peers-out", daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that was sent is whole at the peer; returns whether nothing is left."""
        with self._news:
            return self._news.wait_for(lambda: not self._waiting and not self._under_way, timeout_s)

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: bool(self._waiting))
                box, header, body = self._waiting.pop(0)
                connection = self._socket
                self._under_way = 1
            try:
                if connection is None:
                    continue
                _write(connection, box, header, body)
            except OSError as error:
                _log.info("Sending to the peer has ended: %s", error)
                self.disconnect()
            finally:
                del body
                with self._news:
                    self._under_way = 0
                    self._news.notify_all()


def _write(connection: socket.socket, box: str, header: bytes, body: Sequence[memoryview]) -> None:
    name = box.encode()
    head = _HEAD.pack(len(name), len(header), sum(part.nbytes for part in body))
    connection.sendall(head + name + header)
    for part in body:
        connection.sendall(part)
    if _exactly(connection, len(_ACK)) != _ACK:
        raise OSError("the peer did not say that it has all")


# ---- Who is at the other end -------------------------------------------------------------------


def _answer(connection: socket.socket, key: bytes) -> int:
    """Have the sender prove that it knows the key, prove it too, and return its rank."""
    connection.settimeout(_HELLO_S)
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(mine)
    hello = bytes(_exactly(connection, _FROM.size + _NONCE_BYTES))
    proof = bytes(_exactly(connection, 32))
    if not hmac.compare_digest(proof, _proof(key, b"out", hello + mine)):
        raise ValueError("it does not know the session's key")
    connection.sendall(_proof(key, b"in", hello))
    connection.settimeout(None)
    (rank,) = _FROM.unpack(hello[: _FROM.size])
    return int(rank)


def _ask(connection: socket.socket, rank: int, key: bytes) -> None:
    """Prove to an inbox that this rank knows the key, and have it prove so."""
    theirs = bytes(_exactly(connection, _NONCE_BYTES))
    hello = _FROM.pack(rank) + secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(hello + _proof(key, b"out", hello + theirs))
    if not hmac.compare_digest(bytes(_exactly(connection, 32)), _proof(key, b"in", hello)):
        raise OSError("the peer does not know the session's key")
    connection.settimeout(None)


def _proof(key: bytes, role: bytes, hello: bytes) -> bytes:
    return hmac.digest(key, role + hello, "sha256")


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    _fill(connection, memoryview(data))
    return data


def _fill(connection: socket.socket, room: memoryview) -> None:
    while room:
        # One call for all of it: each piece would take the GIL from training once more.
        got = connection.recv_into(room, flags=socket.MSG_WAITALL)
        if not got:
            raise OSError("the other end has closed it")
        room = room[got:]
