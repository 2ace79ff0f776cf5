"""The warmed parent: imports torch once, then starts every process of a local cluster.

It forks engines that already have torch imported (milliseconds and shared memory instead of a
second and 150 MB each), sees its children die at once, and passes signals on. Forking is safe
only while the parent has one thread and has never touched CUDA: it imports, and does nothing
else. Where that cannot be had (macOS, a site hook that starts threads), it starts fresh
interpreters instead, and says so in its `ready` event.

Talks JSON lines over one socket pair with the kernel. Requests:

    {"op": "start", "number": ..., "key": ..., "log": ..., "spec": {},
     "role": "controller" | "store" | "engine"}
    {"op": "signal", "pid": ..., "signal": ..., "group": bool}
    {"op": "quit"}

Events: `started` (key, number, pid), `ready` (seconds, forks, why, gpus), `exited` (key, pid,
status, evidence: what is known of a SIGKILL, see `host/oom.py`), `failed` (key, number, error).
Ends, and ends its children, when the kernel does. A controller's private folder, with the
connection keys, is removed when it has ended.
"""

import gc
import importlib
import inspect
import json
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from typing import Any

from nbdist.host import oom

# What a rank would otherwise import by itself, a second or more each.
_WARM_MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "ipykernel.ipkernel",
    "ipyparallel.engine.app",
    "nbdist.engine.rank.boot",
    "nbdist.engine.rank.register",
    "nbdist.engine.rank.control",
    "nbdist.engine.recovery.resize",
    "nbdist.engine.training.torch_profile",
    "nbdist.clock",
    "nbdist.host.store",
    # Which IPython and ipykernel import when a kernel is made.
    "IPython.core.completerlib",
    "IPython.core.logger",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "cloudpickle",
    "sqlite3",
    "tornado.platform.asyncio",
    # The first traceback's: a rank that is interrupted cannot end its cell before it is made.
    "stack_data",
    "pygments.formatters.terminal256",
    "pygments.lexers.python",
)

_CHILD_MODULES = {
    "controller": "nbdist.host.controller",
    "store": "nbdist.host.store",
    "engine": "nbdist.engine.rank.boot",
}


class Parent:
    """Children by pid, and one channel to the kernel. Single-threaded by design."""

    def __init__(self, channel: socket.socket, kernel_pid: int, *, fork: bool) -> None:
        self._channel = channel
        self._kernel_pid = kernel_pid
        self._fork = fork
        self._why_not = "" if fork else "this platform starts fresh interpreters"
        self._children: dict[int, str] = {}
        self._private: dict[int, str] = {}
        self._oom = oom.OomWatch()
        self._unread = b""
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def serve(self) -> None:
        """Answer requests until the kernel is gone or asks to quit."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._fork and _count_threads() > 1:
            # Before the first fork: a site hook has started a thread in every Python.
            self._fork, self._why_not = False, _threads_text()
        # The controller needs no torch: it is asked for first and starts up beside our imports.
        for request in self._receive():
            self._handle(request)
        self._warm()
        selector = selectors.DefaultSelector()
        selector.register(self._channel, selectors.EVENT_READ)
        selector.register(self._wake_read, selectors.EVENT_READ)
        kernel_fd = self._watch_kernel(selector)
        while True:
            self._reap()
            self._oom.refresh()
            ready = {key.fd for key, _ in selector.select(timeout=1.0)}
            if kernel_fd in ready or not _alive(self._kernel_pid):
                return
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            if self._channel.fileno() in ready:
                requests = self._receive()
                if not requests:
                    return
                for request in requests:
                    if request["op"] == "quit":
                        return
                    self._handle(request)

    def end_children(self) -> None:
        """Kill every child's process group, and collect them."""
        for pid in list(self._children):
            _signal_group(pid, signal.SIGKILL)
        deadline = time.monotonic() + 2.0
        while self._children and time.monotonic() < deadline:
            self._reap()
            select.select([self._wake_read], [], [], 0.05)

    def _watch_kernel(self, selector: selectors.BaseSelector) -> int:
        if not hasattr(os, "pidfd_open"):
            return -1
        fd = os.pidfd_open(self._kernel_pid)
        selector.register(fd, selectors.EVENT_READ)
        return fd

    def _warm(self) -> None:
        began = time.monotonic()
        if self._fork:
            gc.disable()  # it looked through 300,000 objects again and again, a fifth of the time
            for name in _WARM_MODULES:
                importlib.import_module(name)
            # Fills the table of modules by file, which takes 0.1 s at the first traceback.
            inspect.getmodule(inspect.currentframe())
            # What is here now is never looked at again: a child's first full collection would
            # take 0.3 s, and copy every page that it shares with this process.
            gc.freeze()
            gc.enable()
            self._why_not = _unsafe_to_fork()
            self._fork = not self._why_not
        self._send(
            event="ready",
            seconds=time.monotonic() - began,
            forks=self._fork,
            why=self._why_not,
            gpus=_count_gpus() if self._fork else _count_gpus_elsewhere(),
        )

    def _receive(self) -> list[dict[str, Any]]:
        """Return the requests that have arrived, at least one; none when the kernel is gone."""
        while b"\n" not in self._unread:
            data = self._channel.recv(1 << 16)
            if not data:
                return []
            self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        return [json.loads(line) for line in lines]

    def _send(self, **event: Any) -> None:
        try:
            self._channel.sendall(json.dumps(event).encode() + b"\n")
        except OSError:
            # The kernel is gone; the loop ends by itself on its next turn.
            return

    def _handle(self, request: dict[str, Any]) -> None:
        if request["op"] == "start":
            self._start(request)
        elif request["op"] == "signal":
            pid = request["pid"]
            if pid in self._children:
                if request.get("group"):
                    _signal_group(pid, request["signal"])
                else:
                    os.kill(pid, request["signal"])

    def _start(self, request: dict[str, Any]) -> None:
        key, role, number = request["key"], request["role"], request["number"]
        spec = {**request["spec"], "kernel_pid": self._kernel_pid}
        _leave_deleted_folder()
        try:
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                listener = _listen(spec["address"]) if role == "store" else None
                if self._fork:
                    pid = self._fork_child(role, spec, log, listener)
                else:
                    pid = _spawn_child(role, spec, log, listener)
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

    def _fork_child(
        self, role: str, spec: dict[str, Any], log: int, listener: socket.socket | None
    ) -> int:
        pid = os.fork()
        if pid:
            return pid
        # In the child. Whatever happens, never return into the parent's loop.
        status = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._channel.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            _redirect(log)
            _run_role(role, spec, listener)
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

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
                _signal_group(pid, signal.SIGKILL)
                if pid in self._private:
                    shutil.rmtree(self._private.pop(pid), ignore_errors=True)
                code = os.waitstatus_to_exitcode(status)
                told = self._oom.explain(pid, code)
                self._send(event="exited", key=key, pid=pid, status=code, evidence=told)


def _run_role(role: str, spec: dict[str, Any], listener: socket.socket | None) -> None:
    if role == "controller":
        from nbdist.host import controller

        controller.run(spec)
    elif role == "store":
        from nbdist.host import store

        assert listener is not None
        store.run(listener, spec["kernel_pid"])
    else:
        from nbdist.engine.rank import boot

        boot.run(spec)


def _spawn_child(role: str, spec: dict[str, Any], log: int, listener: socket.socket | None) -> int:
    """Start a fresh interpreter for `role`; its children are seen by `waitpid` like forks."""
    command = [sys.executable, "-m", _CHILD_MODULES[role], json.dumps(spec)]
    keep = []
    if listener is not None:
        command.append(str(listener.fileno()))
        keep = [listener.fileno()]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=keep,
        start_new_session=True,
    )
    process.returncode = 0  # we collect it ourselves; keep Popen from waiting on it
    return process.pid


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


def _redirect(log: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)


def _unsafe_to_fork() -> str:
    """Return why this process must not fork, or an empty text."""
    import torch

    if torch.cuda.is_initialized():
        return "CUDA is already initialised in the parent"
    return _threads_text() if _count_threads() > 1 else ""


def _threads_text() -> str:
    return f"{_count_threads()} threads run in the parent, and a process with threads must not fork"


def _count_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except FileNotFoundError:
        return threading.active_count()


def _count_gpus() -> int:
    """Count GPUs in a child, so that this process never touches CUDA."""
    import torch

    if torch.version.cuda is None:
        return 0
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        count = 0
        try:
            count = torch.cuda.device_count()
        finally:
            os.write(write, str(count).encode())
            os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], 30.0)
    text = os.read(read, 16) if ready else b""
    os.close(read)
    if not ready:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return int(text or b"0")


def _count_gpus_elsewhere() -> int:
    code = "import torch; print(torch.cuda.device_count() if torch.version.cuda else 0)"
    try:
        text = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (subprocess.SubprocessError, OSError):
        return 0
    return int(text.split()[-1])


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        # Gone already, or (macOS) a group of zombies.
        return


def _alive(pid: int) -> bool:
    from nbdist import lifeline

    return lifeline.is_alive(pid)


def main(arguments: list[str]) -> None:
    """Run as `python -m nbdist.host.parent FD KERNEL_PID fork|spawn`."""
    channel = socket.socket(fileno=int(arguments[0]))
    if os.getsid(0) != os.getpid():
        os.setsid()
    parent = Parent(channel, int(arguments[1]), fork=arguments[2] == "fork")
    try:
        parent.serve()
    finally:
        parent.end_children()


if __name__ == "__main__":
    main(sys.argv[1:])
