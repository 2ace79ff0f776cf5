"""Which ranks a cluster has, which of them live, and how the others ended.

Any thread: processes are started on the main one, and end on the launcher's.
"""

import itertools
import signal
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from nbdist.client.cluster.launchers.base import UNKNOWN_STATUS, Started

HOST_LOST = "its host "  # as launchers begin the evidence, with its name and why it is lost
_OOM_KILLER = "killed by the kernel's OOM killer"  # as `host/oom.py` says it


@dataclass(slots=True)
class RankProcess:
    """One rank as the notebook knows it.

    While it lives `exit_status` is None; afterwards `cause` tells its end in words, with why it was
    ended (`killed_for`) where we did it. `is_here` tells whether `pid` names a process of the
    notebook's machine. Hosts number their processes alike, so that what names one for good is its
    `serial`.
    """

    rank: int
    pid: int
    host: str
    device: str = "cpu"
    is_here: bool = True
    serial: int = 0
    exit_status: int | None = None
    cause: str = ""
    killed_for: str = ""

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self.exit_status is None


class Processes:
    """The ranks by number. A process may end before the one who started it knows its pid."""

    def __init__(self) -> None:
        """Begin without ranks."""
        self.ranks: dict[int, RankProcess] = {}
        self._lock = threading.Lock()
        self._serials = itertools.count(1)
        self._starting: set[int] = set()
        self._early: dict[int, tuple[int, str]] = {}  # status and cause of those that ended so

    def expect(self, ranks: Iterable[int]) -> None:
        """Note that processes are being started for these ranks, and for no others."""
        with self._lock:
            self._early.clear()
            self._starting = set(ranks)

    def came(self, rank: int, process: Started) -> None:
        """Enter an expected rank's process, which may have ended since."""
        with self._lock:
            state = RankProcess(
                rank,
                process.pid,
                process.host,
                is_here=process.is_here,
                serial=next(self._serials),
            )
            if rank in self._early:
                state.exit_status, state.cause = self._early[rank]
            self.ranks[rank] = state
            self._starting.discard(rank)

    def adopt(self, ranks: Iterable[RankProcess]) -> None:
        """Enter ranks as another kernel knew them."""
        with self._lock:
            self.ranks.update((state.rank, state) for state in ranks)

    def ended(self, rank: int, status: int, cause: str) -> bool:
        """Enter a process's end; return False for one that is still expected."""
        with self._lock:
            if rank in self._starting:
                self._early[rank] = status, cause
                return False
            state = self.ranks[rank]
            state.exit_status, state.cause = status, cause
            if state.killed_for:
                state.cause += f", because {state.killed_for}"
            return True

    def remove(self, ranks: Iterable[int]) -> None:
        """Forget these ranks."""
        with self._lock:
            for rank in ranks:
                self.ranks.pop(rank, None)

    def living(self) -> list[int]:
        """Return the ranks whose processes are there."""
        with self._lock:
            return [rank for rank, state in sorted(self.ranks.items()) if state.alive]

    def dead(self) -> list[int]:
        """Return the ranks whose processes have ended."""
        with self._lock:
            return [rank for rank, state in sorted(self.ranks.items()) if not state.alive]


def describe_end(status: int, evidence: str = "") -> str:
    """Return how a process ended in words: `killed by SIGKILL`, `exit code 3`.

    Args:
        status: Its exit code, minus the signal's number, or `UNKNOWN_STATUS`.
        evidence: What is known beside it; see `Launcher.on_exit`. That nothing speaks for the
            kernel's OOM killer helps nobody, and stays in the log of events.
    """
    if evidence.startswith((_OOM_KILLER, HOST_LOST)):
        return evidence
    if status == UNKNOWN_STATUS:
        return "it ended unseen, after the process that had started it"
    if status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"
    return f"exit code {status}"
