"""A parent's children: the controller, the store and the ranks, forked or as fresh interpreters."""

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

_MODULES = {
    "controller": "nbdist.host.controller",
    "store": "nbdist.host.store",
    "engine": "nbdist.engine.rank.boot",
}


def fork(
    role: str,
    spec: dict[str, Any],
    log: int,
    listener: socket.socket | None,
    let_go: Callable[[], None],
) -> int:
    """Fork a child for `role` and return its pid.

    Args:
        role: "controller", "store" or "engine".
        spec: What it is told.
        log: Descriptor of the file for its output.
        listener: The store's.
        let_go: Called in the child: closes what is the parent's alone.
    """
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
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGURG, signal.SIG_DFL)
        let_go()
        _redirect(log)
        _run(role, spec, listener)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def spawn(role: str, spec: dict[str, Any], log: int, listener: socket.socket | None) -> int:
    """Start a fresh interpreter for `role`; its end is seen by `waitpid` like a fork's."""
    command = [sys.executable, "-m", _MODULES[role], json.dumps(spec)]
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


def signal_child(pid: int, number: int) -> None:
    """Send a signal to a child, which is not collected yet, and to all that it has started."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        os.kill(pid, number)  # it has just been forked, and leads no group yet
    except PermissionError:
        return  # macOS: a group of zombies


def signal_group(pid: int, number: int) -> None:
    """Send a signal to what a child that has ended had started; nothing if that is gone."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        # Gone already, or (macOS) a group of zombies.
        return


def _run(role: str, spec: dict[str, Any], listener: socket.socket | None) -> None:
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


def _redirect(log: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
