"""How long to wait for a process: as long as it makes progress; a notice names what is awaited.

A limit in seconds is right on one machine and wrong on the next: torch's import takes a second
here, and minutes at load 60 or from a cold network home. A process that has ended is noticed at
once, so that only one that hangs needs an end: it sleeps, and no processor works for it.

A long call into C++ computes, one that reads from a disk does not sleep, and a process that is
stopped or held by a debugger is someone's wish: all of these are waited for.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import psutil

from nbdist.client.cluster.processes import RankProcess

HANGS_AFTER_S = 120.0  # of a process that starts, or forms a group with others
FAR_S = 600.0  # the longest for one of another machine, of which we see no processor time
_SHARE = 0.01  # of a core: less than that is the heartbeat of the process
_WAITS = frozenset({psutil.STATUS_SLEEPING, psutil.STATUS_IDLE})
_FIRST_WORD_S = 15.0


@dataclass(frozen=True, slots=True)
class _Since:
    at: float
    processor_s: float


class IdleProcesses:
    """Processor time of processes, by any number, since they began to sleep. One thread only."""

    def __init__(self, after_s: float) -> None:
        """Begin with none.

        Args:
            after_s: For how long one must have got on no further to be idle (s).
        """
        self._after_s = after_s
        self._since: dict[int, _Since] = {}

    def attend(self, processor_s: Mapping[int, float], now: float) -> list[int]:
        """Return which are idle by now.

        Args:
            processor_s: For each one that is waited for and sleeps, its processor time (s).
            now: `time.monotonic()`.
        """
        self._since = {number: at for number, at in self._since.items() if number in processor_s}
        idle = []
        for number, used_s in processor_s.items():
            since = self._since.setdefault(number, _Since(now, used_s))
            if used_s - since.processor_s > _SHARE * max(1.0, now - since.at):
                self._since[number] = _Since(now, used_s)  # it makes progress
            elif now - since.at >= self._after_s:
                idle.append(number)
        return idle


class LongWait:
    """Tells a person of a wait, each time when it has lasted about twice as long."""

    def __init__(self, what: str, say: Callable[[str], None], now: float) -> None:
        """Begin to wait.

        Args:
            what: For what, after "waiting for ".
            say: Shows a sentence.
            now: `time.monotonic()`.
        """
        self._what, self._say, self._began = what, say, now
        self._next_s = _FIRST_WORD_S

    def attend(self, now: float) -> None:
        """Say how long it has lasted, if that is news."""
        if (for_s := now - self._began) >= self._next_s:
            self._next_s = 2 * for_s
            self._say(f"Waiting for {self._what}: {for_s:.0f} s so far (interrupt to give up).")


def sleeping_s(ranks: Iterable[RankProcess]) -> dict[int, float]:
    """Return the processor time (s) of those ranks that sleep, as far as this machine knows."""
    here = {state.rank: processor_s(state.pid) for state in ranks if state.is_here}
    return {rank: used_s for rank, used_s in here.items() if used_s is not None}


def processor_s(pid: int) -> float | None:
    """Return the processor time (s) of a process of this machine; None where it does not sleep."""
    try:
        process = psutil.Process(pid)
        if process.status() not in _WAITS:
            return None
        times = process.cpu_times()
    except psutil.Error:
        return None  # it has ended, which is reported elsewhere
    return float(times.user + times.system)
