"""Work that comes after training: at a low priority, and seldom while the cores are full.

How full they are is measured by who asks: of the time in which its thread could have run, the share
in which it waited for a core. Linux counts that for each thread (/proc/thread-self/schedstat);
elsewhere it follows from the load average.
"""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

# A thread that is put off while it holds the interpreter's lock makes all of its process wait: with
# 5 it still gets a quarter of a core that a rank wants. A process has no such lock to share.
THREAD_NICE, PROCESS_NICE = 5, 10
FULL = 0.4  # from this share of waiting on, pauses are the longest
LONGEST_S = 2.0

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def lower_thread() -> None:
    """Lower the priority of the calling thread, and of what it starts; a lower one stays.

    Does nothing on the main thread, for which cells wait, nor where threads have no priority of
    their own (all but Linux).
    """
    if sys.platform == "linux" and threading.current_thread() is not threading.main_thread():
        _lower(threading.get_native_id(), THREAD_NICE)


def lower_process() -> None:
    """Lower the priority of this process, before it has threads; a lower one stays."""
    if hasattr(os, "setpriority"):
        _lower(0, PROCESS_NICE)


def _lower(who: int, nice: int) -> None:
    with contextlib.suppress(PermissionError):  # a sandbox may forbid it: then all are equal
        if os.getpriority(os.PRIO_PROCESS, who) < nice:
            os.setpriority(os.PRIO_PROCESS, who, nice)


def cores() -> float:
    """Return how many cores this process may use; a container's quota may be a fraction."""
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = _QUOTA.read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else min(allowed, int(quota) / int(period))


def pause_s(usual_s: float, worked_s: float, share: float, waiting: float) -> float:
    """Return how long to rest after work: longer the more it had to wait for a core.

    Args:
        usual_s: With cores to spare.
        worked_s: Processor time of the work.
        share: Most of one core that it may take.
        waiting: The share of time that it waited for a core, 0 to 1.
    """
    fullness = min(1.0, max(0.0, waiting) / FULL)
    return max(usual_s + fullness * max(0.0, LONGEST_S - usual_s), worked_s * (1.0 / share - 1.0))


def waiting_under(load: float, cores: int) -> float:
    """Return which share of time a thread waits when `load` of them want to run."""
    return max(0.0, 1.0 - cores / load) if load > 0 else 0.0


class CoreWaits:
    """How much the thread that made this waits for a core; it alone may ask."""

    def __init__(self) -> None:
        self._seen_ns = thread_ns()
        self._worked_ns = self._delayed_ns = 0.0

    def share(self) -> float:
        """Return which share of the time in which it could have run it waited, 0 to 1.

        What was before the last call counts half, before that a quarter, and so on: one delay by
        chance changes little.
        """
        now_ns = thread_ns()
        if now_ns is None or self._seen_ns is None:
            has_load = hasattr(os, "getloadavg")  # all but Windows
            return waiting_under(os.getloadavg()[0], os.cpu_count() or 1) if has_load else 0.0
        self._worked_ns = self._worked_ns / 2 + now_ns[0] - self._seen_ns[0]
        self._delayed_ns = self._delayed_ns / 2 + now_ns[1] - self._seen_ns[1]
        self._seen_ns = now_ns
        ready_ns = self._worked_ns + self._delayed_ns
        return self._delayed_ns / ready_ns if ready_ns else 0.0


def thread_ns() -> tuple[int, int] | None:
    """Return this thread's processor time, and its time without a core; None where not known."""
    try:
        fields = _SCHEDSTAT.read_text().split()
    except OSError:
        return None
    return time.thread_time_ns(), int(fields[1])
