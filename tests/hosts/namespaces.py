"""Processes in namespaces of their own, which end with the process that made them.

The namespaces have no names that anybody must remember to delete: they live as long as their first
process, and that one is killed by the kernel when its starter dies, also by kill -9.
"""

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import psutil

from tests.hosts import commands
from tests.hosts.waiting import wait_until


class Namespace:
    """New namespaces, with `command` as their first process.

    Args:
        kinds: What is new, by the names of unshare(1): "net", "mount", "pid", ...
        command: The first process. With "pid" it is process 1: all others die with it.
        log: A file for its stderr.
    """

    def __init__(self, kinds: Sequence[str], command: Sequence[str], log: IO[bytes]) -> None:
        flags = [f"--{kind}" for kind in kinds] + (["--mount-proc"] if "pid" in kinds else [])
        self.kinds = tuple(kinds)
        self._unshare = subprocess.Popen(
            # unshare kills its child when it dies itself, and dies when we do.
            ["setpriv", "--pdeathsig", "KILL", "unshare", *flags, "--kill-child", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        children = wait_until(
            lambda: self._unshare.poll() is not None or _children(self._unshare.pid),
            "unshare starts its child",
        )
        if children is True:
            raise commands.CommandFailed(f"unshare {flags} exited: see {log.name}")
        self.pid = children[0]
        self.ids = {os.readlink(f"/proc/{self.pid}/ns/{_LINKS[kind]}") for kind in kinds}

    @property
    def stdout(self) -> IO[bytes]:
        """What the first process prints."""
        assert self._unshare.stdout is not None
        return self._unshare.stdout

    @property
    def is_alive(self) -> bool:
        return self._unshare.poll() is None

    def enter(self, *kinds: str) -> list[str]:
        """Return the words that run a command in these namespaces (in all of them by default)."""
        flags = [f"--{kind}" for kind in kinds or self.kinds]
        return ["nsenter", f"--target={self.pid}", *flags, "--"]

    def kill(self) -> None:
        """Kill the first process, and wait until it is gone: with "pid", all others too."""
        if self._unshare.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._unshare.wait(10)
        self.stdout.close()


def child_pid(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> int:
    """Return the process id, as seen here, of the command that a host's `popen` runs there."""
    pid: int = wait_until(lambda: _children(process.pid), "nsenter starts the command")[0]
    return pid


def pids_in(ids: set[str]) -> list[int]:
    """Return the processes in any of these namespaces ("net:[4026531840]"), without zombies."""
    return [pid for pid in psutil.pids() if ids & _namespaces_of(pid)]


def _namespaces_of(pid: int) -> set[str]:
    folder = Path(f"/proc/{pid}/ns")
    try:
        return {os.readlink(folder / name) for name in ("net", "pid", "mnt")}
    except OSError:  # it has just ended
        return set()


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


_LINKS = {"net": "net", "mount": "mnt", "pid": "pid", "uts": "uts", "ipc": "ipc"}
