"""Processor time of what serves a training beside its ranks: the notebook's threads, our processes.

Totals never fall, whatever ends or is started again meanwhile (`Totals`). Any thread.
"""

import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from functools import wraps
from typing import TypeVar, cast

F = TypeVar("F", bound=Callable[..., None])

_PARTS = {
    "MainThread": "cell",
    "nbdist-board": "board",
    "nbdist-detail": "board",
    "nbdist-analysis": "analysis",
    "nbdist-tracking": "tracking",
}
_OTHERS = "messages"  # ipyparallel's and ipykernel's threads, which send and receive
_SHIPPING = "nbdist.client.tracking.shipping.ship"


class Totals:
    """Seconds by part, of things that come and go: of what has ended, those it was last seen with.

    What it has computed since is not known, and never is the sum less than before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[Hashable, tuple[str, float]] = {}
        self._ended: dict[str, float] = {}

    def note(self, thing: Hashable, part: str, seconds: float) -> None:
        """Take in what one thing has computed so far."""
        with self._lock:
            self._note(thing, part, seconds)

    def read(self, look: Callable[[], Mapping[Hashable, tuple[str, float]]]) -> dict[str, float]:
        """Return the sums, with what `look` finds of all things that there are: part and seconds.

        It is called under the lock: of two readers at once the later one finds what is newer.
        """
        with self._lock:
            found = look()
            for gone in self._seen.keys() - found.keys():
                part, seconds = self._seen.pop(gone)
                self._ended[part] = self._ended.get(part, 0.0) + seconds
            for thing, (part, seconds) in found.items():
                self._note(thing, part, seconds)
            sums = dict(self._ended)
            for part, seconds in self._seen.values():
                sums[part] = sums.get(part, 0.0) + seconds
            return sums

    def _note(self, thing: Hashable, part: str, seconds: float) -> None:
        part, before = self._seen.get(thing, (part, 0.0))
        self._seen[thing] = part, max(before, seconds)


_threads, _processes = Totals(), Totals()


def counts(run: F) -> F:
    """Wrap what a thread runs, so that its time is still known when it has ended."""

    @wraps(run)
    def counted(*args: object) -> None:
        try:
            run(*args)
        finally:
            me = threading.current_thread()
            _threads.note(me, _part(me.name), time.thread_time())

    return cast(F, counted)


def in_threads() -> dict[str, float]:
    """Return the seconds that this process's threads have computed so far, by part."""
    return _threads.read(_look_at_threads)


def in_processes(ranks: Collection[int]) -> dict[str, float]:
    """Return the seconds that our processes on this machine have computed so far, by part.

    Args:
        ranks: The pids of ranks, which count theirs themselves.
    """
    return _processes.read(lambda: _look_at_processes(ranks))


def _look_at_threads() -> dict[Hashable, tuple[str, float]]:
    found: dict[Hashable, tuple[str, float]] = {}
    for thread in threading.enumerate():
        if thread.ident is not None and (seconds := _seconds(thread.ident)) is not None:
            found[thread] = _part(thread.name), seconds
    return found


def _look_at_processes(ranks: Collection[int]) -> dict[Hashable, tuple[str, float]]:
    import psutil

    found: dict[Hashable, tuple[str, float]] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            times = process.cpu_times()
        except psutil.Error:  # it has ended meanwhile
            continue
        if process.pid not in ranks and "nbdist" in command:
            part = "shipping" if _SHIPPING in command else "controller"
            found[process] = part, times.user + times.system  # one is its pid and when it began
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
