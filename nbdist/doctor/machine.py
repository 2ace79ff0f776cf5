"""Cores, memory, /dev/shm, disk and file descriptors of this machine."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import psutil

from nbdist.doctor.findings import Finding
from nbdist.shared.text import name_bytes

_MIB = 1 << 20
_GIB = 1 << 30
_SMALL_SHM_BYTES = 256 * _MIB  # containers are given 64 MiB unless asked otherwise
_RANK_BYTES = 400 * _MIB  # of a rank that has imported torch and made its group
_LITTLE_DISK_BYTES = 1 * _GIB
# A rank has some 60 open, its peers' connections among them; the controller some 100, and 10 more
# a rank; the kernel a few hundred with notebooks that have been open for long.
_FEW_DESCRIPTORS = 1024


def judge_cores(cores: float) -> Finding:
    """Judge the number of cores; fewer than ranks is slow, not wrong."""
    if cores < 2:
        return Finding("cores", f"{cores:g}: ranks take turns, so steps take as long as their sum")
    return Finding("cores", f"{cores:g}")


def look_at_memory() -> tuple[int, int]:
    """Return the memory that this process may still take, and the limit it lies under, in bytes.

    The limit is that of the container, where there is one, else what the machine has.
    """
    machine = psutil.virtual_memory()
    free, limit = machine.available, machine.total
    top = Path("/sys/fs/cgroup")
    for most, used in (
        (top / "memory.max", top / "memory.current"),
        (top / "memory/memory.limit_in_bytes", top / "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # "max", or no such cgroup
            allowed, taken = int(most.read_text()), int(used.read_text())
            if allowed < limit:
                free, limit = min(free, allowed - taken), allowed
    return free, limit


def judge_memory(free_bytes: int, limit_bytes: int) -> Finding:
    """Judge whether two ranks fit."""
    says = f"{name_bytes(free_bytes)} of {name_bytes(limit_bytes)} free"
    if free_bytes < 2 * _RANK_BYTES:
        fix = "close programs you do not need, or give the container more: a rank takes 400 MB"
        return Finding("memory", f"{says}: too little for two ranks", True, fix)
    return Finding("memory", says)


def look_at_shared_memory() -> tuple[int, int] | None:
    """Return size and free space of /dev/shm in bytes; None where there is none (macOS)."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return None
    return stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail


def judge_shared_memory(size: tuple[int, int] | None) -> Finding:
    """Judge /dev/shm, through which the workers of a DataLoader hand over their batches."""
    if size is None:
        return Finding("/dev/shm", "none on this system, and none needed")
    size_bytes, free_bytes = size
    says = f"{name_bytes(free_bytes)} of {name_bytes(size_bytes)} free"
    if size_bytes < _SMALL_SHM_BYTES:
        fix = "start the container with --shm-size=1g, or use DataLoader(num_workers=0)"
        return Finding("/dev/shm", f"{says}: workers of a DataLoader run out of it", True, fix)
    if free_bytes < _SMALL_SHM_BYTES:
        fix = "see what fills it: ls -l /dev/shm, and who has a file open: fuser -v FILE"
        return Finding("/dev/shm", f"{says}: workers of a DataLoader run out of it", True, fix)
    return Finding("/dev/shm", says)


def look_at_disk(folder: Path) -> int | None:
    """Return the free space under `folder` in bytes; None where it may not be written to."""
    try:
        if not os.access(folder, os.W_OK):
            return None
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def judge_disk(folder: Path, free_bytes: int | None) -> Finding:
    """Judge the disk that holds `.nbdist`: logs, runs and checkpoints."""
    if free_bytes is None:
        fix = "%cd to a folder of yours, or change its permissions"
        return Finding("disk", f"{folder} cannot be written to", True, fix)
    says = f"{name_bytes(free_bytes)} free in {folder}"
    if free_bytes < _LITTLE_DISK_BYTES:
        fix = "free space, or %cd to another disk: runs and logs are kept in .nbdist"
        return Finding("disk", says, True, fix)
    return Finding("disk", says)


def look_at_descriptors() -> int | None:
    """Return how many files this process, and so each rank, may have open; None: no limit."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def judge_descriptors(limit: int | None) -> Finding:
    """Judge the limit of open files."""
    if limit is None:
        return Finding("open files", "no limit")
    if limit < _FEW_DESCRIPTORS:
        fix = "ulimit -n 4096    (in the shell that starts Jupyter)"
        return Finding("open files", f"{limit} a process, which many ranks use up", True, fix)
    return Finding("open files", f"{limit} a process")
