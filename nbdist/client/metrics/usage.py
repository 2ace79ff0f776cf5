"""Processor time of what serves a training beside its ranks: the notebook's threads, our processes.

A thread that ends while a cell is shown leaves its time behind (`counts`). Any thread.
"""

import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import TypeVar, cast

F = TypeVar("F", bound=Callable[..., None])

_PARTS = {
    "MainThread": "cell",
    "nbdist-board": "board",
    "nbdist-analysis": "analysis",
    "nbdist-tracking": "tracking",
}
_OTHERS = "messages"  # ipyparallel's and ipykernel's threads, which send and receive
_SHIPPING = "nbdist.client.tracking.ship"

_ended: dict[str, float] = {}  # seconds of threads that are no more, by part
_lock = threading.Lock()


def counts(run: F) -> F:
    """Wrap what a thread runs, so that its time is still known when it has ended."""

    @wraps(run)
    def counted(*args: object) -> None:
        try:
            run(*args)
        finally:
            part = _part(threading.current_thread().name)
            with _lock:
                _ended[part] = _ended.get(part, 0.0) + time.thread_time()

    return cast(F, counted)


def in_threads() -> dict[str, float]:
    """Return the seconds that this process's threads have computed so far, by part."""
    with _lock:
        found = dict(_ended)
    for thread in threading.enumerate():
        if thread.ident is not None and (seconds := _seconds(thread.ident)) is not None:
            part = _part(thread.name)
            found[part] = found.get(part, 0.0) + seconds
    return found


def in_processes(ranks: set[int]) -> dict[str, float]:
    """Return the seconds that our processes on this machine have computed so far, by part.

    Args:
        ranks: The pids of ranks, which count theirs themselves.
    """
    import psutil

    found: dict[str, float] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            times = process.cpu_times()
        except psutil.Error:  # it has ended meanwhile
            continue
        if process.pid not in ranks and "nbdist" in command:
            part = "shipping" if _SHIPPING in command else "controller"
            found[part] = found.get(part, 0.0) + times.user + times.system
    return found


def _part(name: str) -> str:
    return _PARTS.get(name, _OTHERS)


def _seconds(ident: int) -> float | None:
    if not hasattr(time, "pthread_getcpuclockid"):  # Windows, macOS before 3.13
        return None
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(ident))
    except OSError:  # it has ended meanwhile
        return None
