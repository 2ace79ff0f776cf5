"""End a process when the notebook's kernel ends, however that happened.

A kernel may be killed without a chance to clean up (kill -9, out of memory). Every process
nbdist starts therefore watches the kernel itself: through a pidfd on Linux, kqueue on macOS,
and by asking twice a second elsewhere. Nothing here depends on the GIL's holder being polite
for longer than one switch: a C call that never releases it is covered by the parent process,
which watches as well and ends its children from outside.

`python -m nbdist.shared.processes.lifeline PID COMMAND...` runs a command that ends with process
PID.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

_POLL_S = 0.5


def wait_for_end(pid: int) -> None:
    """Return once process `pid` has ended. Works for processes that are not our children."""
    if hasattr(os, "pidfd_open"):
        _wait_pidfd(pid)
    elif hasattr(select, "kqueue"):
        _wait_kqueue(pid)
    else:
        while is_alive(pid):
            time.sleep(_POLL_S)


def _wait_pidfd(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # poll, not select: a process with more than 1024 files open has larger numbers.
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.poll()
    finally:
        os.close(fd)


def _wait_kqueue(pid: int) -> None:
    queue = select.kqueue()  # type: ignore[attr-defined]
    try:
        event = select.kevent(  # type: ignore[attr-defined]
            pid,
            filter=select.KQ_FILTER_PROC,  # type: ignore[attr-defined]
            flags=select.KQ_EV_ADD | select.KQ_EV_ONESHOT,  # type: ignore[attr-defined]
            fflags=select.KQ_NOTE_EXIT,  # type: ignore[attr-defined]
        )
        queue.control([event], 1, None)
    except ProcessLookupError:
        return
    finally:
        queue.close()


def is_alive(pid: int) -> bool:
    """Return whether a process `pid` exists; it need not be ours."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def watch(pid: int, then: Callable[[], None]) -> threading.Thread:
    """Call `then` on a daemon thread as soon as process `pid` has ended."""

    def run() -> None:
        try:
            wait_for_end(pid)
        finally:
            # Also when waiting itself failed: a process that cannot see its kernel must not
            # stay behind unguarded.
            then()

    thread = threading.Thread(target=run, name="nbdist-lifeline", daemon=True)
    thread.start()
    return thread


def end_own_session() -> None:
    """Kill this process's whole group, itself included. The caller leads its own session."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


def end_with(pid: int) -> None:
    """Lead a session of its own, which ends with process `pid`, children included."""
    os.setsid() if os.getsid(0) != os.getpid() else None
    watch(pid, end_own_session)


def main(arguments: list[str]) -> int:
    """Run a command in a session of its own; end it, children included, when PID ends."""
    pid, command = int(arguments[0]), arguments[1:]
    end_with(pid)
    try:
        return subprocess.call(command)
    finally:
        os.killpg(os.getpgrp(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
