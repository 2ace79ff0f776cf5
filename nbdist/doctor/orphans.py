"""What notebooks that have ended have left: processes, shared memory, private folders.

Only what is proven to be nbdist's, and of a kernel that has ended, is named to be ended or deleted.
"""

import contextlib
import json
import os
import re
import shlex
import socket
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from nbdist.client.cluster.controller import find_orphans
from nbdist.doctor.findings import Finding
from nbdist.shared.text import name_bytes

# What processes of nbdist are started as: `python -m nbdist.host.parent FD KERNEL_PID fork`, or
# `python -m nbdist.engine.rank.boot '{..., "kernel_pid": KERNEL_PID}'`.
_PARENT = "nbdist.host.parent"
_CHILDREN = ("nbdist.host.controller", "nbdist.host.store", "nbdist.engine.rank.boot")
# torch names memory that is handed over between processes by the one that made it.
_TORCH_MEMORY = re.compile(r"torch_(\d+)_\d+")
_ANSWER_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Process:
    """What is needed to tell a process that was left over.

    `words` is its command line, `born_s` when it was started, since the epoch.
    """

    pid: int
    parent: int
    words: tuple[str, ...]
    born_s: float = 0.0


def examine() -> list[Finding]:
    """Return all findings about what was left over."""
    processes = look_at_processes()
    shared = look_at_shared_memory()
    pids = psutil.pids()
    return [
        judge_leftovers(find_leftovers(processes, look_at_births(find_kernels(processes)))),
        judge_shared_leftovers(find_shared_leftovers(shared, pids)),
        judge_folders(look_at_folders(Path(tempfile.gettempdir()))),
    ]


def look_at_processes() -> list[Process]:
    """Return this user's processes."""
    me = os.getuid()
    found = []
    for process in psutil.process_iter():
        # Processes end while we look, and those of others keep their words to themselves.
        with contextlib.suppress(psutil.Error):
            if process.uids().real == me:
                words = tuple(process.cmdline())
                born_s = process.create_time()
                found.append(Process(process.pid, process.ppid(), words, born_s))
    return found


def look_at_births(pids: Iterable[int]) -> dict[int, float]:
    """Return when each of these processes, anybody's, was started; those that have ended lack."""
    births = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:  # which has ended
                births[pid] = process.create_time()
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            births[pid] = 0.0  # it lives, and keeps its age to itself
    return births


def find_kernels(processes: Iterable[Process]) -> set[int]:
    """Return the kernels for which processes of nbdist have been started."""
    return {kernel for process in processes if (kernel := _kernel_of(process)) is not None}


def find_leftovers(
    processes: Sequence[Process], kernels: Mapping[int, float] | None = None
) -> list[Process]:
    """Return processes of nbdist whose notebook is proven to have ended.

    Each names its kernel on its command line. Another process may have got that number since: it
    is younger. That alone proves nothing where the numbers are a container's, so a second proof is
    asked for. A process of nbdist is the child of a notebook's kernel or of another process of
    nbdist; when the kernel ends, the eldest of them is handed to a process that has nothing to do
    with Python (init, a container's reaper, a user's systemd).

    Args:
        processes: This user's.
        kernels: When the `find_kernels` that live were started; by default none lives.
    """
    births = kernels or {}
    by_pid = {process.pid: process for process in processes}

    def is_left_over(process: Process) -> bool:
        kernel = _kernel_of(process)
        if kernel is None or births.get(kernel, process.born_s + 1) <= process.born_s:
            return False
        seen = {process.pid}
        while (parent := by_pid.get(process.parent)) and parent.pid not in seen:
            if not _is_ours(parent):
                # A kernel, or a test that plays one; under `docker run` it may even be process 1.
                return not any("python" in word for word in parent.words[:2])
            seen.add(parent.pid)
            process = parent
        return True

    return [process for process in processes if _is_ours(process) and is_left_over(process)]


def _is_ours(process: Process) -> bool:
    return _kernel_of(process) is not None


def _kernel_of(process: Process) -> int | None:
    """Return the kernel that a process of nbdist serves; None for any other process."""
    match process.words:
        case (python, "-m", module, _, kernel, "fork" | "spawn") if module == _PARENT:
            pass
        case (python, "-m", module, spec, *_) if module in _CHILDREN:
            try:
                kernel = str(json.loads(spec)["kernel_pid"])
            except (ValueError, TypeError, KeyError):
                return None
        case _:
            return None
    is_python = "python" in Path(python).name
    return int(kernel) if is_python and kernel.isdecimal() else None


def judge_leftovers(leftovers: Sequence[Process]) -> Finding:
    """Judge what `find_leftovers` found; such processes hold memory, cores and GPUs."""
    if not leftovers:
        return Finding("processes", "none left over")
    pids = " ".join(str(process.pid) for process in leftovers)
    says = f"{len(leftovers)} of notebooks that have ended still run"
    return Finding("processes", says, True, f"kill -9 {pids}")


def look_at_shared_memory() -> list[Path]:
    """Return this user's files in /dev/shm."""
    found = []
    with contextlib.suppress(OSError):
        for path in Path("/dev/shm").iterdir():
            with contextlib.suppress(OSError):  # gone meanwhile
                if path.stat().st_uid == os.getuid():
                    found.append(path)
    return found


def find_shared_leftovers(files: Iterable[Path], pids: Collection[int]) -> list[Path]:
    """Return shared memory of torch's whose maker is none of these processes."""
    living = set(pids)
    return [
        path
        for path in files
        if (made := _TORCH_MEMORY.match(path.name)) and int(made[1]) not in living
    ]


def judge_shared_leftovers(files: Sequence[Path]) -> Finding:
    """Judge what `find_shared_leftovers` found.

    Nothing tells whether a rank made it, another program, or one in a container that shares
    /dev/shm: so it is named, and nothing is said of deleting it.
    """
    if not files:
        return Finding("shared memory", "none left over")
    size_bytes = 0
    for path in files:
        with contextlib.suppress(OSError):  # gone meanwhile
            size_bytes += path.stat().st_size
    says = (
        f"{len(files)} of torch's files in /dev/shm ({name_bytes(size_bytes)}) are of processes "
        "that are not here: ended, or in another container"
    )
    return Finding("shared memory", says)


def look_at_folders(temp: Path) -> list[Path]:
    """Return private folders of clusters that have ended: neither owner nor controller is there."""
    return [folder for folder in find_orphans(temp) if not _answers(folder)]


def _answers(folder: Path) -> bool:
    """Return whether the controller of a private folder is there."""
    try:
        facts = json.loads(next(folder.glob("security/*-client.json")).read_text())
        host = facts["interface"].removeprefix("tcp://")
        with socket.create_connection((host, facts["registration"]), _ANSWER_TIMEOUT_S):
            return True
    except (StopIteration, OSError, ValueError, KeyError):
        return False


def judge_folders(folders: Sequence[Path]) -> Finding:
    """Judge what `look_at_folders` found: keys that open nothing any more."""
    if not folders:
        return Finding("folders", "none left over")
    says = f"{len(folders)} with keys of clusters that have ended"
    return Finding("folders", says, True, f"rm -r {shlex.join(map(str, folders))}")
