"""Ask this user's running clusters from a terminal: `nbdist status | peek | stop` and more.

Finds the sockets on which kernels listen (`user_socket`), removes those of kernels that have ended,
and chooses the cluster that is meant: of several, that of the notebook in this folder.
"""

import base64
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbdist.shared.errors import ClusterError, NBDistError
from nbdist.shared.processes import detached, user_socket

_FIND_TIMEOUT_S = 2.0
_ASK_TIMEOUT_S = 20.0  # ranks have 5 s to say what they do, and 5 for their stacks
_BOARD_TIMEOUT_S = 30.0  # the first picture on a machine builds matplotlib's font cache
_WATCH_S = 3.0
_STEP_TIMEOUT_S = 2000.0  # the next step may take a minute, and an expression's collective 30
_STOP_TIMEOUT_S = 60.0  # a cell that runs is interrupted, and settles first


@dataclass(frozen=True, slots=True)
class Found:
    """A kernel with a cluster; `trouble` says why it does not tell more of it."""

    pid: int
    socket: Path
    folder: str = ""
    describe: str = ""
    trouble: str = ""
    notebook: str = ""  # its file's name, where that is known

    def __str__(self) -> str:
        if self.trouble:
            return f"kernel {self.pid}: {self.trouble}"
        place = f"{self.folder}/{self.notebook}" if self.notebook else self.folder
        return f"kernel {self.pid}: {self.describe}, in {place}"

    def is_in(self, folder: Path | None) -> bool:
        """Return whether its notebook is in this folder, which is a resolved one."""
        return bool(self.folder) and Path(self.folder).resolve() == folder


def status(pid: int | None) -> str:
    """Return what each rank does, of kernel `pid` or of all this user's clusters.

    In a notebook's folder that is the cluster of this one, and the others are listed.

    Raises:
        ClusterError: There is none, or it does not answer.
    """
    found = find()
    free = [] if pid is not None else [one for one in detached.find() if one.kernel is None]
    if pid is not None or (len(found) < 2 and not free):
        return _text(choose(found, pid), "status", _ASK_TIMEOUT_S)
    here = _folder_here()
    own = [one for one in found if one.is_in(here)]
    blocks = []
    for cluster in own or found:
        try:
            said = "" if cluster.trouble else f"\n{_text(cluster, 'status', _ASK_TIMEOUT_S)}"
        except ClusterError as error:
            said = f"\n{error}"
        blocks.append(f"{cluster}{said}")
    if own and (others := [str(one) for one in found if one not in own]):
        blocks.append("\n".join(["In other folders:", *others]))
    blocks += [f"detached {one}" for one in free]
    return "\n\n".join(blocks)


def stacks(pid: int | None, ranks: str) -> str:
    """Return what ranks do and their stacks; raises as `status`, and where several are meant."""
    return _text(_meant(pid), "stacks", _ASK_TIMEOUT_S, ranks=ranks)


def checks(pid: int | None) -> str:
    """Return the rules on silent mistakes, and what they found; raises as `stacks`."""
    return _text(_meant(pid), "checks", _ASK_TIMEOUT_S)


def pause(pid: int | None) -> str:
    """Let the training stand still, all ranks after the same step; raises as `stacks`."""
    return _text(_meant(pid), "pause", _STEP_TIMEOUT_S)


def go_on(pid: int | None) -> str:
    """Let a training go on that is paused; raises as `stacks`."""
    return _text(_meant(pid), "continue", _ASK_TIMEOUT_S)


def peek(pid: int | None, expression: str) -> str:
    """Return what an expression gives on all ranks after the next step; raises as `stacks`."""
    return _text(_meant(pid), "peek", _STEP_TIMEOUT_S, expression=expression)


def change(pid: int | None, words: Sequence[str]) -> str:
    """Set values such as `lr=0.01` on all ranks after the same step; raises as `stacks`."""
    return _text(_meant(pid), "change", _STEP_TIMEOUT_S, words=list(words))


def board(pid: int | None, view: str, png: Path | None = None) -> tuple[str, bool]:
    """Return what the board of the cell that trains, or has trained last, says; and if it runs.

    Args:
        pid: The kernel.
        view: One of the board's views.
        png: Where to write its picture; None writes none.

    Raises:
        ClusterError: As `stacks`, or no cell has trained yet.
        NBDistError: The picture cannot be written.
    """
    said = _ask(_meant(pid), "board", _BOARD_TIMEOUT_S, view=view, png=png is not None)
    if png is not None:
        try:
            png.write_bytes(base64.b64decode(said["png"]))
        except OSError as error:
            raise NBDistError(
                f"The picture cannot be written to {png}.", why=error.strerror or str(error)
            ) from error
    return str(said["text"]), bool(said["runs"])


def watch(pid: int | None, view: str, png: Path | None, show: Callable[[str], None]) -> None:
    """Show the board again and again until its cell ends; raises as `board`."""
    while True:
        said, runs = board(pid, view, png)
        show(said)
        if not runs:
            return
        time.sleep(_WATCH_S)


def stop(pid: int | None, name: str | None = None) -> str:
    """End all ranks, a running cell with an interrupt; raises as `stacks`.

    With `name` it is a detached cluster, whether a kernel has it or not.
    """
    if name is not None:
        cluster = detached.choose(detached.find(), name)
        if cluster.kernel is None:
            return detached.stop(cluster)
        pid = cluster.kernel
    found = find()
    if not found and pid is None and (free := detached.find()):
        listed = "\n".join(f"     {one}" for one in free)
        raise ClusterError(
            "None of your notebooks has a running cluster; detached ones are stopped by name.",
            why=f"they are\n{listed}",
            do="nbdist stop NAME",
        )
    return _text(choose(found, pid, _folder_here()), "stop", _STOP_TIMEOUT_S)


def find() -> list[Found]:
    """Return this user's clusters on this machine, by their kernels' pids."""
    found = {}
    for folder in user_socket.own_folders():
        if not user_socket.is_private(folder):
            continue
        for path in folder.glob(f"*{user_socket.SUFFIX}"):
            if path.stem.isdecimal() and (cluster := _look(path)):
                found[cluster.pid] = cluster
    return [found[pid] for pid in sorted(found)]


def _look(path: Path) -> Found | None:
    """Ask who listens; None, and the socket removed, when its kernel has ended."""
    pid = int(path.stem)
    try:
        said = _exchange(path, {"ask": "who"}, _FIND_TIMEOUT_S)
        folder, describe = str(said["folder"]), str(said["describe"])
        return Found(pid, path, folder, describe, notebook=str(said.get("notebook", "")))
    except (ConnectionRefusedError, FileNotFoundError):
        detached.remove_dead(path)
        return None
    except (OSError, ValueError, KeyError) as error:
        return Found(pid, path, trouble=f"does not answer ({error or type(error).__name__})")


def _meant(pid: int | None) -> Found:
    return choose(find(), pid, _folder_here())


def _folder_here() -> Path | None:
    try:
        return Path.cwd()
    except OSError:  # it is gone
        return None


def choose(found: Sequence[Found], pid: int | None, here: Path | None = None) -> Found:
    """Return the cluster that is meant.

    Args:
        found: All there are.
        pid: The kernel that was asked for, if one was.
        here: This folder: of several clusters, that of its only notebook with one is meant.

    Raises:
        ClusterError: None is, or more than one.
    """
    if not found:
        raise ClusterError(
            "None of your notebooks on this machine has a running cluster.",
            do="%dist start in a notebook.",
        )
    chosen = [cluster for cluster in found if pid in (None, cluster.pid)]
    if len(own := [cluster for cluster in chosen if cluster.is_in(here)]) == 1:
        chosen = own
    listed = "\n".join(f"     {cluster}" for cluster in found)
    if not chosen:
        raise ClusterError(f"Kernel {pid} has no cluster of yours.", why=f"there are\n{listed}")
    if len(chosen) > 1:
        raise ClusterError(
            f"{len(chosen)} clusters are running.",
            why=f"they are\n{listed}",
            do="add --pid PID, or ask in the notebook's folder",
        )
    return chosen[0]


def _text(cluster: Found, question: str, timeout_s: float, **more: Any) -> str:
    return str(_ask(cluster, question, timeout_s, **more)["text"])


def _ask(cluster: Found, question: str, timeout_s: float, **more: Any) -> dict[str, Any]:
    """Ask and return the answer; an error of the kernel's is raised."""
    try:
        said = _exchange(cluster.socket, {"ask": question, **more}, timeout_s)
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"Kernel {cluster.pid} does not answer.",
            why=f"{error or type(error).__name__}. It may be stopped, or hold Python's GIL.",
            do=f"try again, or end it: kill {cluster.pid}    (its ranks end with it)",
        ) from error
    if "error" in said:
        what, why, do = map(str, said["error"])
        raise ClusterError(what, why=why, do=do)
    return said


def _exchange(path: Path, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        if not user_socket.is_this_user(connection):
            raise PermissionError("another user listens there")
        user_socket.send(connection, question, timeout_s)
        return user_socket.receive(connection, user_socket.ANSWER_BYTES, timeout_s)
