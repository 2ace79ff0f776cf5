"""What notebooks that have ended have left: processes, shared memory, private folders."""

import contextlib
import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from nbdist.doctor.findings import Finding

# What processes of nbdist are started as: `python -m nbdist.host.parent ...`.
_OUR_MODULES = ("nbdist.host.", "nbdist.engine.")
# torch names memory that is handed over between processes by the one that made it.
_TORCH_MEMORY = re.compile(r"torch_(\d+)_\d+")
_YOUNG_S = 120.0  # a cluster that starts has a folder and no controller yet
_ANSWER_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Process:
    """What is needed to tell a process that was left over; `words` is its command line."""

    pid: int
    parent: int
    words: tuple[str, ...]


def examine() -> list[Finding]:
    """Return all findings about what was left over."""
    processes = look_at_processes()
    shared = look_at_shared_memory()
    pids = psutil.pids()
    return [
        judge_leftovers(find_leftovers(processes)),
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
                found.append(Process(process.pid, process.ppid(), words))
    return found


def find_leftovers(processes: Sequence[Process]) -> list[Process]:
    """Return processes of nbdist whose notebook has ended.

    A process of nbdist is the child of a notebook's kernel or of another process of nbdist. When
    the kernel ends, the eldest of them is handed to a process that has nothing to do with Python
    (init, a container's reaper, a user's systemd).
    """
    by_pid = {process.pid: process for process in processes}

    def is_left_over(process: Process) -> bool:
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
    return any(
        flag == "-m" and module.startswith(_OUR_MODULES)
        for flag, module in zip(process.words, process.words[1:], strict=False)
    )


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
    """Return shared memory of torch's whose maker has ended.

    Somebody else may still have it open, and keeps what is in it: deleting its name harms nobody.
    """
    living = set(pids)
    return [
        path
        for path in files
        if (made := _TORCH_MEMORY.match(path.name)) and int(made[1]) not in living
    ]


def judge_shared_leftovers(files: Sequence[Path]) -> Finding:
    """Judge what `find_shared_leftovers` found; it fills /dev/shm."""
    if not files:
        return Finding("shared memory", "none left over")
    says = f"{len(files)} files of DataLoaders that have ended are in /dev/shm"
    return Finding("shared memory", says, True, f"rm {' '.join(map(str, files))}")


def look_at_folders(temp: Path) -> list[Path]:
    """Return private folders of clusters whose controller does not answer any more."""
    found = []
    for folder in temp.glob("nbdist-*"):
        with contextlib.suppress(OSError):
            stat = folder.stat()
            young = time.time() - stat.st_mtime < _YOUNG_S
            is_own = folder.is_dir() and stat.st_uid == os.getuid()
            if is_own and not young and not _answers(folder):
                found.append(folder)
    return sorted(found)


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
    return Finding("folders", says, True, f"rm -r {' '.join(map(str, folders))}")
