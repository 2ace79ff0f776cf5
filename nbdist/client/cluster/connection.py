"""The private parts of ipyparallel's client that nbdist uses; only this module touches them.

Tried with ipyparallel 9.2. `check()` says what broke when one of them moves. What is touched,
and why:

- `_dispatch_reply`, `_dispatch_iopub`, `_dispatch_single_reply`: a message's handler is known
  before the message is sent, so nothing is lost between sending and listening, and text is not
  gathered a second time in `metadata` (its cost grows with the square of the lines);
- `_mux_stream`, `_control_stream`, `_query_stream`, `_io_loop`: to send requests of our own (the
  streams, never their sockets: sending on a socket behind its stream swallows the wake-up for
  what has just arrived, and replies stay unread);
- `_engines`, `_ids`, `_registration_callbacks`: which engine is which, and when it came.

Threads: handlers run on ipyparallel's IO thread and must be quick and must not block.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import ipyparallel

from nbdist.shared import wire

TRIED = {"ipyparallel": "9.2"}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Message:
    """One message from a rank. `kind` is its Jupyter type; `reply` is False for iopub."""

    kind: str
    content: dict[str, Any]
    metadata: dict[str, Any]
    buffers: list[Any]
    reply: bool
    id: str = ""


Handler = Callable[[Message], None]


class _Client(ipyparallel.Client):  # type: ignore[misc]
    """ipyparallel's client, with a handler for each message we sent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Before the base class: it starts the thread that reads this.
        self.handlers: dict[str, Handler] = {}
        super().__init__(*args, **kwargs)

    def activate(self, *_: Any, **__: Any) -> None:
        """Leave IPython alone: the base class would define %px for a cluster that is ours."""

    def _dispatch_reply(self, parts: list[Any]) -> None:
        if not self._handled(parts, reply=True):
            super()._dispatch_reply(parts)

    def _dispatch_single_reply(self, parts: list[Any]) -> None:
        if not self._handled(parts, reply=True):
            super()._dispatch_single_reply(parts)

    def _dispatch_iopub(self, parts: list[Any]) -> None:
        if not self._handled(parts, reply=False):
            super()._dispatch_iopub(parts)

    def _handled(self, parts: list[Any], *, reply: bool) -> bool:
        """Hand a message to its handler; False leaves it to the base class."""
        try:
            _, frames = self.session.feed_identities(parts, copy=False)
            # Peek at the headers only: a full `deserialize` counts as the message's one arrival.
            header, parent = frames[1].bytes, self.session.unpack(frames[2].bytes)
            kind = self.session.unpack(header)["msg_type"] if b"comm_" in header else ""
            handler = self.handlers.get(parent.get("msg_id", ""))
        except Exception:
            # Whoever reaches the controller's port for output can send anything through it. An
            # exception here, or in the base class, would end the thread that hears the ranks.
            log.info("Bytes that are no message were dropped")
            return True
        if kind.startswith("comm_"):
            return False  # widgets made on a rank: the base class relays them to the browser
        if handler is None:
            return not reply or parent.get("msg_id", "") not in self._futures
        try:
            message = self.session.deserialize(frames, content=True, copy=False)
            kind = message["msg_type"]
            values = message["content"], message["metadata"], message["buffers"]
            handler(Message(kind, *values, reply, message["header"]["msg_id"]))
        except Exception:
            # An exception here would end ipyparallel's IO thread, and with it the session.
            log.exception("A handler failed on a message %s", kind)
        return True


class Connection:
    """The notebook's end of the wire: sends to ranks, hears their answers."""

    def __init__(self, connection_file: Path, timeout_s: float) -> None:
        """Connect to a controller.

        Raises:
            TimeoutError: The controller did not answer within `timeout_s`.
        """
        self._client = _Client(str(connection_file), timeout=timeout_s)
        self._arrived = threading.Condition()
        self._client._registration_callbacks.append(self._on_registration)

    def _on_registration(self, event: dict[str, Any]) -> None:
        with self._arrived:
            self._arrived.notify_all()

    def engines(self) -> dict[int, str]:
        """Return the registered engines: rank (engine id) to uuid."""
        return {rank: self._client._engines[rank] for rank in list(self._client._ids)}

    def wait_for(
        self, ranks: Iterable[int], timeout_s: float, check: Callable[[], None] | None = None
    ) -> bool:
        """Wait until engines with these ids are registered; False if `timeout_s` ran out.

        Args:
            ranks: Engine ids to wait for.
            timeout_s: Longest wait.
            check: Called about every 100 ms; raises to give up (a process that died).
        """
        wanted = set(ranks)
        deadline = time.monotonic() + timeout_s
        while not wanted <= set(self._client._ids):
            if check is not None:
                check()
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with self._arrived:
                if not wanted <= set(self._client._ids):
                    self._arrived.wait(min(left, 0.1))
        return True

    def send(
        self,
        rank: int,
        kind: str,
        content: dict[str, Any],
        handler: Handler,
        *,
        control: bool = False,
        once: bool = False,
        metadata: dict[str, Any] | None = None,
        buffers: list[Any] | None = None,
        outbox: list[Callable[[], None]] | None = None,
    ) -> str:
        """Send one message to a rank; `handler` gets every message that answers it.

        Args:
            rank: Engine id. It must be registered.
            kind: Message type.
            content: JSON-like.
            handler: Runs on the IO thread; see `forget`.
            control: Send on the control channel, which a busy rank answers too.
            once: Only the reply is wanted; listening ends with it.
            metadata: JSON-like.
            buffers: Raw payloads (bytes-like), sent without a copy.
            outbox: Put what sends it here instead of sending it; see `release`.

        Returns:
            The message's id.

        Raises:
            KeyError: No such engine is registered.
        """
        client = self._client
        ident = client._engines[rank].encode()
        message = client.session.msg(kind, content=content, metadata=metadata)
        message_id: str = message["header"]["msg_id"]

        def reply_only(answer: Message) -> None:
            if answer.reply:
                self.forget(message_id)
                handler(answer)

        client.handlers[message_id] = reply_only if once else handler
        socket = client._control_stream if control else client._mux_stream

        def really_send() -> None:
            try:
                client.session.send(socket, message, buffers=buffers, ident=ident)
            except Exception as error:
                # Nobody would ever answer what was not sent.
                log.exception("A %s message for rank %s could not be sent", kind, rank)
                if waiting := client.handlers.get(message_id):
                    waiting(_not_sent(error))

        if outbox is None:
            client._io_loop.add_callback(really_send)
        else:
            outbox.append(really_send)
        return message_id

    def release(self, outbox: list[Callable[[], None]]) -> None:
        """Send what was put into an outbox, in order."""
        for send in outbox:
            self._client._io_loop.add_callback(send)

    def hear(self, message_id: str, handler: Handler) -> None:
        """Listen for what answers a message that another kernel has sent; its reply is not ours.

        What ranks publish reaches everybody who is connected.
        """
        self._client.handlers[message_id] = handler

    def forget(self, message_id: str) -> None:
        """Stop listening for answers to a message."""
        self._client.handlers.pop(message_id, None)

    def unregister(self, rank: int) -> None:
        """Tell the controller that an engine has died, so that its id is free again.

        The controller would notice by itself, a heartbeat or more later. The nanny process that
        ipyparallel starts beside each engine does the same; our parent process needs none.
        """
        client = self._client

        def really_send() -> None:
            client.session.send(
                client._query_stream, "unregistration_request", content={"id": rank}
            )

        client._io_loop.add_callback(really_send)

    def leave_out(self, rank: int) -> None:
        """Unregister an engine that had died before we connected, and forget it at once.

        The controller may have announced its end before we were connected.
        """
        self.unregister(rank)
        with self._arrived:
            if rank in self._client._ids:
                self._client._ids.remove(rank)
                self._client._engines.pop(rank)

    def wait_gone(self, ranks: Iterable[int], timeout_s: float) -> bool:
        """Wait until no engine with these ids is registered."""
        gone = set(ranks)
        deadline = time.monotonic() + timeout_s
        with self._arrived:
            while gone & set(self._client._ids):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._arrived.wait(left)
        return True

    def close(self) -> None:
        """Close the sockets and end the IO thread."""
        self._client.close(linger=0)


def _not_sent(error: Exception) -> Message:
    """Return an error in place of the reply to a message that could not be sent."""
    text = f"the message could not be sent: {error}"
    content = {
        "error": text,
        "status": "error",
        "ename": type(error).__name__,
        "evalue": text,
        "traceback": [],
    }
    return Message(wire.REPLY, content, {}, [], reply=True)


def check() -> list[str]:
    """Return what no longer fits the installed ipyparallel; empty when all is well."""
    names = (
        *("_dispatch_reply", "_dispatch_iopub", "_dispatch_single_reply", "activate", "close"),
        *("_io_loop", "_futures", "_engines", "_ids", "_registration_callbacks"),
    )
    gone = [name for name in names if not hasattr(ipyparallel.Client, name)]
    # These are made with the connection: the class only has the code that uses them.
    methods = [m for m in vars(ipyparallel.Client).values() if isinstance(m, FunctionType)]
    used = {name for method in methods for name in method.__code__.co_names}
    gone += sorted({"_mux_stream", "_control_stream", "_query_stream", "session"} - used)
    return [f"ipyparallel {ipyparallel.__version__}: Client.{name} is gone" for name in gone]
