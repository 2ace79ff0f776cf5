"""The warmed parent: imports torch once, then starts every process of a cluster on its host.

It forks engines that already have torch imported (milliseconds and shared memory instead of a
second and 150 MB each), sees its children die at once, and passes signals on. Where it must not
fork (`host/warm.py`) it starts fresh interpreters instead, and says so in its `ready` event.

Talks JSON lines: over a socket pair with the kernel, or over standard input and output with the
keeper (`host/keeper.py`), on whichever host that has started it. Requests:

    {"op": "start", "number": ..., "key": ..., "log": ..., "spec": {},
     "role": "controller" | "store" | "engine"}
    {"op": "signal", "pid": ..., "signal": ..., "group": bool}
    {"op": "quit"}

and from a keeper, whose channel may lead to several hosts, with the `host` it is for, and

    {"op": "hello", ...}, {"op": "listen"}, {"op": "reach", ...}     see `host/guest.py`
    {"op": "warm"}                                                   import torch now
    {"op": "beat"}                                                   the keeper lives

Events: `started` (key, number, pid), `ready` (seconds, forks, why, gpus, no_gpu: why there is
none), `exited` (key, pid, ended: the fields of an `Ended`), `failed` (key, number, error), and on a
host that is told to leave, by SIGTERM or SIGURG, `notice` (signal).
Ends, and ends its children, when the other end does. A controller's private folder, with the
connection keys, is removed when it has ended.
"""

import os
import select
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from typing import Any, Final

from nbdist.host import children, oom, warm
from nbdist.host.guest import Guest
from nbdist.host.link import JsonLines, over_stdio
from nbdist.shared.options import HASH_SEED
from nbdist.shared.processes import lifeline

LEAVE_S: Final = 20.0  # after SIGTERM: schedulers kill after 30 s


class Parent:
    """Children by pid, and one channel. Single-threaded by design."""

    def __init__(
        self, link: JsonLines, kernel_pid: int, *, fork: bool, guest: Guest | None = None
    ) -> None:
        """Serve `link`.

        Args:
            link: To the kernel or the keeper.
            kernel_pid: What children watch: the kernel, or this process on another host.
            fork: Fork ranks, if that is safe.
            guest: What is different where a keeper is at the other end.
        """
        self._link = link
        self._kernel_pid = kernel_pid
        self._fork = fork
        self._why_not = "" if fork else "this platform starts fresh interpreters"
        self._guest = guest
        self._is_warm = False
        self._children: dict[int, str] = {}
        self._private: dict[int, str] = {}
        self._oom = oom.OomWatch()
        self._noticed: list[int] = []  # signals that have not been reported
        self._leaves_at = float("inf")
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def serve(self) -> None:
        """Answer requests until the other end is gone or asks to quit."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._guest is not None:
            for number in (signal.SIGTERM, signal.SIGURG):
                signal.signal(number, lambda got, _: self._noticed.append(got))
        if self._fork and (threads := warm.why_threads()):
            # Before the first fork: a site hook has started a thread in every Python.
            self._fork, self._why_not = False, threads
        # The controller needs no torch: it is asked for first and starts up beside our imports.
        is_asked = False
        while not is_asked:
            requests = self._receive()
            if requests is None or not all(self._handle(request) for request in requests):
                return
            is_asked = any(request["op"] in ("start", "warm") for request in requests)
        self._warm()
        selector = selectors.DefaultSelector()
        selector.register(self._link, selectors.EVENT_READ)
        selector.register(self._wake_read, selectors.EVENT_READ)
        kernel_fd = self._watch_kernel(selector)
        while True:
            self._reap()
            self._oom.refresh()
            ready = {key.fd for key, _ in selector.select(timeout=1.0)}
            if kernel_fd in ready or not lifeline.is_alive(self._kernel_pid):
                return
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            if self._link.fileno() in ready:
                requests = self._receive()
                if requests is None or not all(self._handle(request) for request in requests):
                    return
            if self._guest is not None and not self._guest.beat():
                return
            self._tell_notices()
            if time.monotonic() > self._leaves_at:
                return

    def end_children(self) -> None:
        """Kill every child's process group, and collect them."""
        for pid in list(self._children):
            children.signal_child(pid, signal.SIGKILL)
        deadline = time.monotonic() + 2.0
        while self._children and time.monotonic() < deadline:
            self._reap()
            select.select([self._wake_read], [], [], 0.05)
        if self._guest is not None:
            self._guest.remove_folder()

    def _tell_notices(self) -> None:
        while self._noticed:
            number = self._noticed.pop(0)
            if number == signal.SIGTERM:
                self._leaves_at = min(self._leaves_at, time.monotonic() + LEAVE_S)
            self._send(event="notice", signal=signal.Signals(number).name)

    def _receive(self) -> list[dict[str, Any]] | None:
        """Return the next requests for this host; None when the other end is gone."""
        requests = self._link.receive()
        if not requests:
            return None
        return requests if self._guest is None else self._guest.own(requests)

    def _watch_kernel(self, selector: selectors.BaseSelector) -> int:
        if not hasattr(os, "pidfd_open") or self._kernel_pid == os.getpid():
            return -1
        fd = os.pidfd_open(self._kernel_pid)
        selector.register(fd, selectors.EVENT_READ)
        return fd

    def _warm(self) -> None:
        """Import torch and tell what was found; nothing the second time."""
        if self._is_warm:
            return
        self._is_warm = True
        began = time.monotonic()
        if self._fork:
            warm.import_modules()
            self._why_not = warm.why_not_fork()
            self._fork = not self._why_not
        gpus, no_gpu = warm.find_gpus(fork=self._fork)
        self._send(
            event="ready",
            seconds=time.monotonic() - began,
            forks=self._fork,
            why=self._why_not,
            gpus=gpus,
            no_gpu=no_gpu,
        )

    def _send(self, **event: Any) -> None:
        if self._guest is not None:
            event["host"] = self._guest.host
        self._link.send(**event)

    def _handle(self, request: dict[str, Any]) -> bool:
        """Carry out a request; return False where it was to quit."""
        op = request["op"]
        if op == "start":
            if request["role"] == "engine":
                # A parent that took a dead one's place is asked for a rank first. Forked cold, the
                # rank would import torch while the others already wait for it.
                self._warm()
            self._start(request)
        elif op == "signal":
            pid = request["pid"]
            if pid in self._children:
                if request.get("group"):
                    children.signal_child(pid, request["signal"])
                else:
                    os.kill(pid, request["signal"])
        elif self._guest is not None and op in ("hello", "listen", "reach"):
            self._send(**self._guest.answer(request))
        return bool(op != "quit")

    def _start(self, request: dict[str, Any]) -> None:
        key, role, number = request["key"], request["role"], request["number"]
        spec, path = {**request["spec"], "kernel_pid": self._kernel_pid}, request["log"]
        _leave_deleted_folder()
        try:
            if self._guest is not None:
                spec, path = self._guest.prepare(role, spec, path)
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                listener = _listen(spec["address"]) if role == "store" else None
                if self._fork:
                    pid = children.fork(role, spec, log, listener, self._let_go)
                else:
                    pid = children.spawn(role, spec, log, listener)
            finally:
                os.close(log)
        except OSError as error:
            self._send(event="failed", key=key, number=number, error=str(error))
            return
        self._children[pid] = key
        self._oom.add(pid)
        if role == "controller":
            self._private[pid] = spec["profile_dir"]
        port = listener.getsockname()[1] if listener else None
        if listener:
            listener.close()
        self._send(event="started", key=key, number=number, pid=pid, port=port)

    def _let_go(self) -> None:
        self._link.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            key = self._children.pop(pid, None)
            if key is not None:
                # What the child itself had started (DataLoader workers, a shell) goes with it.
                children.signal_group(pid, signal.SIGKILL)
                if pid in self._private:
                    shutil.rmtree(self._private.pop(pid), ignore_errors=True)
                ended = self._oom.explain(pid, os.waitstatus_to_exitcode(status)).to_wire()
                files = {} if self._guest is None else self._guest.last_words(key)
                self._send(event="exited", key=key, pid=pid, ended=ended, **files)


def _leave_deleted_folder() -> None:
    """Go elsewhere when the current folder is gone: ipyparallel and multiprocessing ask for it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir(tempfile.gettempdir())


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(4096)
    return listener


def _make(arguments: list[str]) -> Parent:
    fork = arguments[-1] == "fork"
    if arguments[0] == "stdio":
        link = over_stdio()
        return Parent(link, os.getpid(), fork=fork, guest=Guest(link))
    channel = socket.socket(fileno=int(arguments[0])).detach()
    return Parent(JsonLines(channel, channel), int(arguments[1]), fork=fork)


def main(arguments: list[str]) -> None:
    """Run as `python -m nbdist.host.parent FD KERNEL_PID fork|spawn`, or `... stdio fork|spawn`."""
    # The order of a set of texts follows from it: ranks of all hosts must have the same.
    if arguments[0] == "stdio" and os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "nbdist.host.parent", *arguments])
    if os.getpgrp() != os.getpid():  # srun has made it a group's leader, which cannot do this
        os.setsid()
    # debugpy, which ipykernel imports, would warn of modules frozen in Python; no rank debugs.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    parent = _make(arguments)
    try:
        parent.serve()
    finally:
        parent.end_children()


if __name__ == "__main__":
    main(sys.argv[1:])
