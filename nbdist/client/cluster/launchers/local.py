"""Start processes on this machine, through the warmed parent (`host/parent.py`).

The parent outlives a cluster: `%dist stop` ends engines, store and controller and keeps the
parent, so that the next start costs no import of torch. It listens on nothing.

Should the parent itself be killed, what it has started lives on: the launcher then watches and
signals those processes itself, and the next `start_soon` makes a new parent.

Threads: one reader thread a parent, which resolves the futures of `start_soon` and calls `on_exit`.
It ends when the parent does. For a process that has lost its parent, `on_exit` is called on the
thread that watches it.
"""

import contextlib
import json
import logging
import os
import signal as signals
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from pathlib import Path
from typing import Any

from nbdist.client.cluster.folders import last_lines
from nbdist.client.cluster.launchers.base import OnExit, OnNotice
from nbdist.client.cluster.launchers.helper_process import start_helper
from nbdist.client.cluster.launchers.parent_link import (
    ExitCallbacks,
    ParentLink,
    encode,
    lines_of,
)
from nbdist.client.cluster.open_files import allow_open_files
from nbdist.client.cluster.patience import HANGS_AFTER_S, IdleProcesses, LongWait, processor_s
from nbdist.client.cluster.processes import Started
from nbdist.shared.errors import StartError
from nbdist.shared.placement import RankPlacement, one_host
from nbdist.shared.processes import lifeline
from nbdist.shared.processes.ended import Ended, EndKind

log = logging.getLogger(__name__)

_IMPORT = "torch's import"
_LOOK_EVERY_S = 1.0


class LocalLauncher:
    """Processes on this machine, by key."""

    def __init__(self, log_folder: Path, *, fork: bool | None = None) -> None:
        """Start the parent; returns at once, while it imports torch.

        Args:
            log_folder: Where each process's stdout and stderr go (0700).
            fork: Fork engines from the parent; by default where the platform allows it.
        """
        self.logs = log_folder
        self._fork = sys.platform == "linux" if fork is None else fork
        self._exit_callbacks = ExitCallbacks()
        self._link = ParentLink(self._send, self._exit_callbacks)
        self._orphans: set[int] = set()
        self._lock = threading.Lock()
        self._start_parent()

    def _start_parent(self) -> None:
        allow_open_files()
        self._ready: Future[dict[str, Any]] = Future()
        self._parent, self._channel = start_helper(
            "nbdist.host.parent",
            "fork" if self._fork else "spawn",
            log=self.logs / "parent.log",
            what="The process that starts the ranks",
        )
        self._reader = threading.Thread(
            target=self._read, args=[self._channel], name="nbdist-launcher", daemon=True
        )
        self._reader.start()

    @property
    def alive(self) -> bool:
        """Whether the parent is still there to start more processes."""
        return self._parent.poll() is None

    def revive(self) -> None:
        """Make a new parent if the last one has ended; returns at once."""
        if self.alive:
            return
        self._reader.join(5)  # it hands over what the last parent has left
        self._channel.close()
        self._start_parent()

    def meet(self, asked: str) -> str:
        """Return the address to listen on: the one that was asked for; see `Launcher.meet`."""
        return asked

    def ready(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Wait for the parent's imports and return its `ready` event; see `Launcher.ready`.

        Its keys: `seconds`, `forks`, `why` (it does not fork), `gpus` on this machine, `no_gpu`.

        Raises:
            StartError: The parent ended, or hangs.
        """
        idle, wait = IdleProcesses(HANGS_AFTER_S), LongWait(_IMPORT, say, time.monotonic())
        while True:
            try:
                return self._ready.result(_LOOK_EVERY_S)
            except FutureTimeoutError:
                now, used_s = time.monotonic(), processor_s(self._parent.pid)
            if idle.attend({} if used_s is None else {0: used_s}, now):
                raise StartError(
                    f"The parent process hangs in {_IMPORT}.",
                    why=f"it has not computed for {HANGS_AFTER_S:.0f} s. Its log: "
                    f"{self.logs / 'parent.log'}",
                    do="%dist doctor",
                )
            wait.attend(now)

    def places(self, n: int, address: str, *, crowded: bool = False) -> dict[int, RankPlacement]:
        """Return the ranks' places: all on this machine; see `Launcher.places`."""
        return one_host(n, address)

    def reopen(self) -> list[str]:
        """Return nothing: this machine is not lost; see `Launcher.reopen`."""
        return []

    def start_soon(self, key: str, role: str, spec: Mapping[str, Any]) -> Future[Started]:
        """Ask for a process; see `Launcher.start_soon`."""
        self.revive()
        try:
            return self._link.start_soon(key, role, spec, self.logs)
        except OSError as error:
            raise _parent_gone(self.logs) from error

    def give_up(self) -> None:
        """Give up what is being started; see `Launcher.give_up`."""
        self._link.give_up()

    def signal(self, key: str, number: int, *, group: bool = False) -> None:
        """Send a signal; see `Launcher.signal`."""
        pid = self._link.pids.get(key)
        if pid is None:
            return
        if pid not in self._orphans:
            with contextlib.suppress(OSError):
                self._link.signal(key, number, group=group)
                return
        # A process in a session of its own: its group has its pid.
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(pid, number)

    def running(self) -> list[str]:
        """Return the keys of the processes that are running."""
        return list(self._link.pids)

    def on_exit(self, callback: OnExit) -> None:
        """Register a callback; see `Launcher.on_exit`."""
        self._exit_callbacks.add(callback)

    def remove_on_exit(self, callback: OnExit) -> None:
        """Undo `on_exit`."""
        self._exit_callbacks.remove(callback)

    def on_notice(self, callback: OnNotice) -> None:
        """Ranks of this machine leave with the notebook; see `Launcher.on_notice`."""

    def rest(self) -> list[str]:
        """Keep the parent for the next start; see `Launcher.rest`."""
        return []

    def close(self) -> None:
        """End everything, the parent last."""
        for key, pid in list(self._link.pids.items()):
            if pid in self._orphans:
                self.signal(key, signals.SIGKILL, group=True)
        try:
            self._send({"op": "quit"})
        except OSError:
            log.debug("The parent had ended already")
        try:
            self._parent.wait(5)
        except subprocess.TimeoutExpired:
            self._parent.kill()
            self._parent.wait(5)
        self._channel.close()

    def _send(self, request: dict[str, Any]) -> None:
        with self._lock:
            self._channel.sendall(encode(request))

    def _read(self, channel: socket.socket) -> None:
        for line in lines_of(channel):
            try:
                event = json.loads(line)
                if event["event"] == "ready":
                    self._ready.set_result(event)
                else:
                    self._link.take(event)
            except Exception:
                log.exception("An event of the parent was lost: %s", line)
        self._on_parent_gone()

    def _on_parent_gone(self) -> None:
        error = _parent_gone(self.logs)
        if not self._ready.done():
            self._ready.set_exception(error)
        self._link.fail_starts(error)
        for key, pid in list(self._link.pids.items()):
            # Its exit status goes to init, which reports it to no one.
            self._orphans.add(pid)
            lifeline.watch(pid, partial(self._orphan_ended, key, pid))

    def _orphan_ended(self, key: str, pid: int) -> None:
        self._link.ended(key, pid, Ended(EndKind.UNSEEN))
        self._orphans.discard(pid)


def make_launcher(logs: Path, _asked: object) -> LocalLauncher:
    """Return a launcher of ranks on this machine."""
    return LocalLauncher(logs)


def _parent_gone(logs: Path) -> StartError:
    return StartError(
        "The parent process that starts the ranks has ended.",
        why=last_lines(logs / "parent.log"),
        do="%dist doctor shows what is wrong; %dist start starts a new one",
    )
