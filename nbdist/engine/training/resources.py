"""Measure a step's resources: processor time of the main thread, and memory.

*Starved* is the time in which the main thread was ready to run and had no core (Linux: the run
delay of /proc/thread-self/schedstat). A core that a hypervisor takes away is not included. The file
is read at both ends of a measured step, 6 us each, so that a wait is that of the step it fell in.

Memory is read twice a second at most: CUDA's figures take some 50 us, and wait for nothing.
"""

import os
from pathlib import Path
from time import thread_time_ns

import torch

EVERY_NS = 500_000_000
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_STATM = "/proc/self/statm"
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Processor:
    """Processor time of the thread that made this, which alone may call `take`."""

    def __init__(self) -> None:
        # Opened once: the file stays that of this thread.
        self._file = _SCHEDSTAT.open("rb", buffering=0) if _SCHEDSTAT.exists() else None
        self._cpu_ns, self._delay_ns = 0, 0
        self.take()

    def take(self) -> dict[str, float]:
        """Return `cpu_s` and, where the system reports it, `starved_s`, since the last call."""
        cpu_ns = thread_time_ns()
        values = {"cpu_s": (cpu_ns - self._cpu_ns) / 1e9}
        self._cpu_ns = cpu_ns
        if self._file is None:
            return values
        delay_ns = int(os.pread(self._file.fileno(), 64, 0).split()[1])
        values["starved_s"] = (delay_ns - self._delay_ns) / 1e9
        self._delay_ns = delay_ns
        return values


class Memory:
    """Memory of this process and of its GPU."""

    def __init__(self) -> None:
        self._next_ns = 0

    def take(self, now_ns: int) -> dict[str, float]:
        """Return the memory in use; empty less than half a second after the last call."""
        if now_ns < self._next_ns:
            return {}
        self._next_ns = now_ns + EVERY_NS
        values = {"rss_bytes": float(resident_bytes())}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            values |= cuda_values(torch.cuda.memory_stats())
        return values


def resident_bytes() -> int:
    """Return the resident memory of this process, shared pages included. Any thread."""
    try:
        file = os.open(_STATM, os.O_RDONLY)
    except OSError:
        import psutil

        return int(psutil.Process().memory_info().rss)
    try:
        return int(os.read(file, 128).split()[1]) * _PAGE
    finally:
        os.close(file)


def cuda_values(stats: dict[str, int]) -> dict[str, float]:
    """Return a step record's values from `torch.cuda.memory_stats()`; empty before any use."""
    wanted = {
        "cuda_bytes": "allocated_bytes.all.current",
        "cuda_reserved_bytes": "reserved_bytes.all.current",
        "cuda_peak_bytes": "allocated_bytes.all.peak",
    }
    return {name: float(stats[key]) for name, key in wanted.items() if key in stats}
