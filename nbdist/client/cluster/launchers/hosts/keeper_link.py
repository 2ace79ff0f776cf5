"""The kernel's end of the keeper (`host/keeper.py`): opens channels, sends lines, hears events.

Threads: one that hears the keeper, `nbdist-hosts`; it ends when the keeper does.
"""

import contextlib
import json
import logging
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

from nbdist.client.cluster.launchers.helper_process import start_helper
from nbdist.client.cluster.launchers.parent_link import encode, lines_of
from nbdist.shared.errors import StartError

log = logging.getLogger(__name__)

_DETACH_S = 10.0
_END_S = 8.0  # for the keeper to end all of its channels


class KeeperLink:
    """One keeper. `events` is called with each event, on the thread that hears it.

    Attributes:
        alive: It is there, and heard.
    """

    alive = False

    def __init__(self, logs: Path, events: Callable[[dict[str, Any]], None]) -> None:
        """Start it; it ends with this process.

        Raises:
            StartError: It could not be started.
        """
        self._lock = threading.Lock()
        self._detached: Future[str] = Future()
        self._process, self._channel = start_helper(
            "nbdist.host.keeper",
            log=logs / "keeper.log",
            what="The process that reaches other hosts",
        )
        self.listen(events)

    def listen(self, events: Callable[[dict[str, Any]], None]) -> None:
        """Begin to hear events."""
        self._events = events
        self.alive = True
        self._hearing = threading.Thread(target=self._hear, name="nbdist-hosts", daemon=True)
        self._hearing.start()

    def open(
        self,
        channel: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        cancel: Sequence[str] = (),
    ) -> None:
        """Run a command that leads to parents; its end is the event `closed`.

        Args:
            channel: Its name.
            command: Its words.
            environment: Variables, beside the notebook's.
            log: For its standard error.
            cancel: A command that ends what it has asked for, where it can no longer do so.

        Raises:
            OSError: The keeper is gone.
        """
        self._send(
            {"op": "open", "channel": channel, "command": list(command), "log": str(log)}
            | {"environment": dict(environment), "cancel": list(cancel)}
        )

    def send(self, channel: str, line: Mapping[str, Any]) -> None:
        """Send a request to the parents of a channel.

        Raises:
            OSError: The keeper is gone.
        """
        self._send({"op": "send", "channel": channel, "line": dict(line)})

    def end(self, channel: str) -> None:
        """End a channel's command, and with it what its parents have started.

        Raises:
            OSError: The keeper is gone.
        """
        self._send({"op": "close", "channel": channel})

    def detach(self, name: str, facts: Mapping[str, Any]) -> None:
        """Let the keeper, and all that it holds, outlive this process.

        Raises:
            StartError: It cannot be found by that name.
        """
        self._send({"op": "detach", "name": name, "facts": dict(facts)})
        try:
            why = self._detached.result(_DETACH_S)
        except FutureTimeoutError:
            why = f"the keeper did not answer within {_DETACH_S:.0f} s"
        if why:
            raise StartError(f"The cluster cannot be detached as {name}.", why=why)

    def remember(self, value: Any, says: str) -> None:
        """Leave a value with the keeper for the next kernel.

        Raises:
            OSError: The keeper is gone.
        """
        self._send({"op": "remember", "value": value, "says": says})

    def leave(self) -> None:
        """Let go of a keeper that is detached."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._hearing.join(_END_S)
        self._channel.close()

    def close(self) -> None:
        """End all channels, and the keeper."""
        try:
            self._send({"op": "quit"})
        except OSError:
            log.debug("The keeper had ended already")
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        self._channel.close()

    def _send(self, request: dict[str, Any]) -> None:
        with self._lock:
            self._channel.sendall(encode(request))

    def _hear(self) -> None:
        for line in lines_of(self._channel):
            try:
                event = json.loads(line)
                if event["event"] == "detached":
                    self._detached.set_result(event["why"])
                else:
                    self._events(event)
            except Exception:
                log.exception("An event of the keeper was lost: %s", line)
        # Before this is reported: who hears of it starts another, and the process may be there yet.
        self.alive = False
        self._events({"event": "gone"})


class AttachedKeeperLink(KeeperLink):
    """A keeper that another kernel has started, and that is detached; hears from `listen` on."""

    def __init__(self, channel: socket.socket) -> None:
        """Talk to it over a connection that `nbdist/shared/processes/detached.py` has made."""
        self._lock = threading.Lock()
        self._channel = channel
        self._detached = Future()
        self._hearing = threading.Thread()  # ended, until `listen`

    def leave(self) -> None:
        """Let go of it."""
        if self._hearing.ident is None:
            self._channel.close()
        else:
            super().leave()

    def close(self) -> None:
        """End all channels, and the keeper."""
        with contextlib.suppress(OSError):
            self._send({"op": "quit"})
        if self._hearing.ident is not None:
            self._hearing.join(_END_S)
            if self._hearing.is_alive():
                log.error("The keeper of a detached cluster did not end")
        self.leave()
