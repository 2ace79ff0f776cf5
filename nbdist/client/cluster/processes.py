"""Which ranks a cluster has, which of them live, and how the others ended.

Any thread: processes are started on the main one, and end on the launcher's.
"""

import itertools
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nbdist.shared.placement import HERE
from nbdist.shared.processes.ended import Ended


@dataclass(frozen=True, slots=True)
class Started:
    """A process that has been started.

    Attributes:
        pid: On its host.
        port: Of the one that listens (the store).
        host: As it is shown.
        is_here: It runs on the notebook's machine, where its pid names it.
    """

    pid: int
    port: int | None = None
    host: str = HERE
    is_here: bool = True


@dataclass(slots=True)
class RankProcess:
    """One rank as the notebook knows it.

    While it lives `ended` is None. Where we end it, `killed_for` says why. `is_here` is True where
    `pid` is a process of the notebook's machine. Hosts may use the same pids: only `serial` is
    unique.
    """

    rank: int
    pid: int
    host: str
    device: str = "cpu"
    is_here: bool = True
    serial: int = 0
    ended: Ended | None = None
    killed_for: str = ""

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self.ended is None


class Processes:
    """The ranks by number. A process may end before the one who started it knows its pid."""

    def __init__(self) -> None:
        """Begin without ranks."""
        self.ranks: dict[int, RankProcess] = {}
        self._lock = threading.Lock()
        self._serials = itertools.count(1)
        self._starting: set[int] = set()
        self._early: dict[int, Ended] = {}

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
                ended=self._early.get(rank),
            )
            self.ranks[rank] = state
            self._starting.discard(rank)

    def adopt(self, ranks: Iterable[Mapping[str, Any]]) -> None:
        """Enter ranks as another kernel knew them, by the fields of `RankProcess`."""
        with self._lock:
            for fields in ranks:
                ended = fields["ended"] and Ended.from_wire(fields["ended"])
                self.ranks[fields["rank"]] = RankProcess(**{**fields, "ended": ended})

    def end(self, rank: int, ended: Ended) -> Ended | None:
        """Enter a process's end; return it with why, or None for one that is still expected."""
        with self._lock:
            if rank in self._starting:
                self._early[rank] = ended
                return None
            state = self.ranks[rank]
            state.ended = replace(ended, because=state.killed_for)
            return state.ended

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
