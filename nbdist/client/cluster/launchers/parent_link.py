"""The processes of one host, by key: requests to its parent (`host/parent.py`) and its reports.

Threads: `take`, `gone` and the callbacks on the thread that hears the parent; the rest on any.
"""

import contextlib
import itertools
import json
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from nbdist.client.cluster.launchers.base import OnExit
from nbdist.client.cluster.processes import Started
from nbdist.shared.errors import ClusterError, StartError
from nbdist.shared.placement import HERE
from nbdist.shared.processes.ended import Ended

log = logging.getLogger(__name__)


class ExitCallbacks:
    """Callbacks for the end of a process."""

    def __init__(self) -> None:
        """Begin without callbacks."""
        self._callbacks: list[OnExit] = []

    def add(self, callback: OnExit) -> None:
        """Register a callback."""
        self._callbacks.append(callback)

    def remove(self, callback: OnExit) -> None:
        """Unregister a callback; no effect if it was not registered."""
        with contextlib.suppress(ValueError):
            self._callbacks.remove(callback)

    def __call__(self, key: str, ended: Ended) -> None:
        """Call all; see `Launcher.on_exit`."""
        for callback in list(self._callbacks):
            try:
                callback(key, ended)
            except Exception:
                log.exception("An exit callback failed for %s", key)


class ParentLink:
    """The processes of one host, and the requests under way to its parent."""

    def __init__(
        self,
        send: Callable[[dict[str, Any]], None],
        report_exit: OnExit,
        host: str = HERE,
        *,
        is_here: bool = True,
    ) -> None:
        """Begin without processes.

        Args:
            send: Sends a request to the parent; raises an OSError when it is gone.
            report_exit: Told of each process that has ended, while it is still among `pids`.
            host: The parent's, as it is shown.
            is_here: Whether that is the notebook's machine.
        """
        self._host, self._is_here = host, is_here
        self.pids: dict[str, int] = {}
        self._send = send
        self._report_exit = report_exit
        self._starting: dict[str, Future[Started]] = {}
        self._numbers = itertools.count(1)
        self._wanted: dict[str, int] = {}  # the number of each key's start that is awaited
        self._lock = threading.Lock()

    def start_soon(
        self, key: str, role: str, spec: Mapping[str, Any], logs: Path
    ) -> Future[Started]:
        """Ask for a process; see `Launcher.start_soon`.

        Raises:
            OSError: The parent is gone.
        """
        future: Future[Started] = Future()
        number = next(self._numbers)
        with self._lock:
            self._starting[key] = future
            self._wanted[key] = number
            # One that was killed, and has not been seen to end yet, no longer counts.
            self.pids.pop(key, None)
        file = str(logs / f"{key.replace(' ', '-')}.log")
        self._send(
            {"op": "start", "number": number, "role": role, "key": key, "log": file}
            | {"spec": dict(spec)}
        )
        return future

    def signal(self, key: str, number: int, *, group: bool = False) -> None:
        """Have the parent send a signal; no effect on a process that has ended.

        Raises:
            OSError: The parent is gone.
        """
        pid = self.pids.get(key)
        if pid is not None:
            self._send({"op": "signal", "pid": pid, "signal": number, "group": group})

    def give_up(self) -> None:
        """Give up what is being started; see `Launcher.give_up`."""
        with self._lock:
            given_up, self._starting = self._starting, {}
            self._wanted.clear()
        for future in given_up.values():
            future.set_exception(ClusterError("The start was given up."))

    def take(self, event: dict[str, Any]) -> None:
        """Take one of a parent's `started`, `failed` and `exited`."""
        name, key = event["event"], event["key"]
        if name == "exited":
            self.ended(key, event["pid"], Ended.from_wire(event["ended"]))
        elif not self._is_wanted(key, event["number"], event.get("pid")):
            if name == "started":
                pid = event["pid"]
                self._send({"op": "signal", "pid": pid, "signal": signal.SIGKILL, "group": True})
        elif name == "started":
            self._resolve(key, Started(event["pid"], event["port"], self._host, self._is_here))
        elif name == "failed":
            self._resolve(key, StartError(f"{key} could not be started: {event['error']}"))

    def ended(self, key: str, pid: int, ended: Ended) -> None:
        """Report that a process has ended; then it is no longer among `pids`."""
        if self.pids.get(key) != pid:
            return
        self._report_exit(key, ended)
        del self.pids[key]

    def fail_starts(self, error: StartError) -> None:
        """Fail what is being started: the parent has ended."""
        for key in list(self._starting):
            self._resolve(key, error)

    def lose(self, error: StartError, ended: Ended) -> None:
        """Take everything as ended that runs or is being started: the host is lost."""
        self.fail_starts(error)
        for key, pid in list(self.pids.items()):
            self.ended(key, pid, ended)

    def _is_wanted(self, key: str, number: int, pid: int | None) -> bool:
        """Return whether a start is awaited still; its process is then one of those that run."""
        # Both at once: given up in between, it would be neither unwanted nor known.
        with self._lock:
            if self._wanted.get(key) != number:
                return False
            del self._wanted[key]
            if pid is not None:
                self.pids[key] = pid
            return True

    def _resolve(self, key: str, outcome: Started | StartError) -> None:
        with self._lock:
            future = self._starting.pop(key, None)
        if future is None:
            return
        if isinstance(outcome, Started):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)


def encode(request: Mapping[str, Any]) -> bytes:
    """Return a request as a line."""
    return json.dumps(request).encode() + b"\n"


def lines_of(channel: socket.socket) -> Iterator[bytes]:
    """Yield the lines that arrive, until the other end is gone."""
    unread = b""
    while True:
        try:
            data = channel.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return
        *lines, unread = (unread + data).split(b"\n")
        yield from lines
