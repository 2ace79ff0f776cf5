"""Find this user's detached clusters, stop one, or attach to one: from a kernel or a terminal.

A detached cluster's keeper listens on a socket of its name (`host/door.py`). One that refuses is
that of a keeper that has ended, and its ranks with it.
"""

import contextlib
import json
import os
import re
import socket
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbdist.shared import wire
from nbdist.shared.errors import ClusterError, UsageError
from nbdist.shared.processes import user_socket

_FIND_TIMEOUT_S = 2.0
_STOP_TIMEOUT_S = 20.0
_ATTACH_TIMEOUT_S = 10.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,39}")
_UNFIT = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class Detached:
    """A detached cluster.

    Attributes:
        name: By which it is attached to.
        path: Its socket.
        folder: Of the notebook that has started it.
        says: What runs, in words.
        since: When it was started, in seconds since 1970.
        kernel: The pid of the kernel that has it; None when none has.
        trouble: Why it tells nothing of this.
    """

    name: str
    path: Path
    folder: str = ""
    says: str = ""
    since: float = 0.0
    kernel: int | None = None
    trouble: str = ""

    def __str__(self) -> str:
        """Return a line about it."""
        if self.trouble:
            return f"{self.name}: {self.trouble}"
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since))
        whose = f"kernel {self.kernel} has it" if self.kernel else "no kernel has it"
        return f"{self.name}: {self.says}; detached since {since}, in {self.folder}; {whose}"


def name_for(asked: str | bool, notebook: str) -> str:
    """Return the name of a cluster that is to be detached.

    Args:
        asked: The name, or True for the notebook's.
        notebook: The notebook's name.

    Raises:
        UsageError: It is no name, or taken.
    """
    name = asked if isinstance(asked, str) else _UNFIT.sub("-", notebook)[:40].lstrip(".-")
    if not _NAME.fullmatch(name or "notebook"):
        raise UsageError(
            f"--detach={name} is no name: letters, digits, '-', '_' and '.', at most 40."
        )
    name = name or "notebook"
    if found := next((one for one in find() if one.name == name), None):
        raise UsageError(
            f"There is a detached cluster {name} already ({found.says or found.trouble}).",
            do=f"%dist attach {name}, or --detach=ANOTHER_NAME, or nbdist stop {name} in a "
            "terminal.",
        )
    return name


def find() -> list[Detached]:
    """Return this user's detached clusters on this machine, by name; removes dead ones' sockets."""
    found = {}
    for folder in user_socket.own_folders():
        if not user_socket.is_private(folder):
            continue
        for path in folder.glob(f"{user_socket.DETACHED}*{user_socket.SUFFIX}"):
            if (cluster := _look(path)) is not None:
                found[cluster.name] = cluster
    return [found[name] for name in sorted(found)]


def _look(path: Path) -> Detached | None:
    """Ask who listens; None, and the socket removed, where its keeper has ended."""
    name = path.name.removeprefix(user_socket.DETACHED).removesuffix(user_socket.SUFFIX)
    try:
        with _ask(path, {"ask": "who"}, _FIND_TIMEOUT_S) as connection:
            answer = user_socket.receive(connection, user_socket.ANSWER_BYTES, _FIND_TIMEOUT_S)
        kernel = answer["kernel"]
        return Detached(name, path, answer["folder"], answer["says"], answer["since"], kernel)
    except (ConnectionRefusedError, FileNotFoundError):
        remove_dead(path)
        return None
    except (OSError, ValueError, KeyError) as error:
        return Detached(name, path, trouble=f"does not answer ({error or type(error).__name__})")


def remove_dead(path: Path) -> None:
    """Remove the socket of a process of this user's that has ended."""
    with contextlib.suppress(OSError):  # gone meanwhile
        facts = path.lstat()
        if stat.S_ISSOCK(facts.st_mode) and facts.st_uid == os.getuid():
            path.unlink()


def choose(found: Sequence[Detached], name: str | None) -> Detached:
    """Return the cluster that is meant; without a name the only one that no kernel has.

    Raises:
        ClusterError: None is, or more than one.
    """
    if name is None:
        free = [one for one in found if one.kernel is None and not one.trouble] or list(found)
    else:
        free = [one for one in found if one.name == name]
    if len(free) == 1:
        return free[0]
    if not found:
        what = f"There is no detached cluster {name}." if name else "There is no detached cluster."
        raise ClusterError(
            what,
            why="none of yours runs on this machine; one whose keeper has ended is gone.",
            do="%dist start --detach",
        )
    listed = "\n     ".join(map(str, found))
    what = f"There is no detached cluster {name}." if name else "Several clusters are detached."
    raise ClusterError(what, why=f"there are\n     {listed}", do="%dist attach NAME")


def attach(cluster: Detached, kernel: int) -> tuple[socket.socket, dict[str, Any]]:
    """Take a cluster for this kernel; return the connection to its keeper, and what it told.

    Raises:
        ClusterError: Another kernel has it, or it has ended, or runs another version of nbdist.
    """
    question = {"ask": "attach", "pid": kernel, "version": wire.VERSION}
    try:
        connection = _ask(cluster.path, question, _ATTACH_TIMEOUT_S)
    except OSError as error:
        raise _ended(cluster) from error
    try:
        answer = json.loads(_first_line(connection))
    except (OSError, ValueError) as error:
        connection.close()
        raise _ended(cluster) from error
    if "error" in answer:
        connection.close()
        raise _refused(answer)
    if answer["memory"] is None:
        connection.close()
        raise ClusterError(
            f"The cluster {cluster.name} cannot be attached to.",
            why="its kernel ended before it was started whole.",
            do=f"nbdist stop {cluster.name} in a terminal",
        )
    connection.settimeout(None)
    return connection, answer


def stop(cluster: Detached) -> str:
    """End a cluster that no kernel has; return a sentence.

    Raises:
        ClusterError: A kernel has it, or it does not end.
    """
    try:
        with _ask(cluster.path, {"ask": "stop"}, _STOP_TIMEOUT_S) as connection:
            answer = user_socket.receive(connection, user_socket.ANSWER_BYTES, _STOP_TIMEOUT_S)
    except (OSError, ValueError) as error:
        raise _ended(cluster) from error
    if "error" in answer:
        raise _refused(answer)
    return f"Stopped {cluster.name}: {cluster.says}, in {cluster.folder}."


def _ask(path: Path, question: dict[str, Any], timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        if not user_socket.is_this_user(connection):
            raise PermissionError("another user listens there")
        connection.sendall(json.dumps(question).encode() + b"\n")
    except BaseException:
        connection.close()
        raise
    return connection


def _first_line(connection: socket.socket) -> bytes:
    """Return the first line, and leave what follows it: that is the keeper's for the launcher."""
    line = b""
    while not line.endswith(b"\n"):
        seen = connection.recv(1 << 16, socket.MSG_PEEK)
        if not seen:
            raise ValueError("it ended early")
        line += connection.recv(seen.find(b"\n") + 1 or len(seen))
    return line


def _refused(answer: dict[str, Any]) -> ClusterError:
    what, why, do = map(str, answer["error"])
    return ClusterError(what, why=why, do=do)


def _ended(cluster: Detached) -> ClusterError:
    return ClusterError(
        f"The cluster {cluster.name} does not answer.",
        why="its keeper has ended, and its ranks with it, or it is stopped.",
        do="%dist start --detach",
    )
