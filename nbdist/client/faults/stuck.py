"""Find ranks that nothing will ever free: they neither answer nor compute.

After a fault every rank's links are cut, so that whoever waits for a peer gets an error. A rank
that waits for a lock inside C++ while it holds the GIL gets none: its control thread cannot answer,
and no processor works for it. Without an end the cell would wait for as long as nobody interrupts
it, through the night where a training was to retry by itself.

A long call into C++ computes, and a rank that is stopped or held by a debugger is someone's wish:
both are waited for.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil

from nbdist.client.cluster.processes import RankState

STUCK_AFTER_S = 30.0
_SHARE = 0.01  # of a core: less than that is the process's own heartbeat
_WAITS = frozenset({psutil.STATUS_SLEEPING, psutil.STATUS_IDLE})
WHY = "nothing could free it: it neither answered nor computed after its links were cut"


@dataclass(frozen=True, slots=True)
class _Since:
    at: float
    processor_s: float


class StuckRanks:
    """What silent ranks have computed since they fell silent. Main thread only."""

    def __init__(self) -> None:
        """Begin with none."""
        self._since: dict[int, _Since] = {}

    def attend(self, processor_s: Mapping[int, float], now: float) -> list[int]:
        """Return the ranks that are stuck by now.

        Args:
            processor_s: For each rank that owes an answer and sleeps, its processor time (s).
            now: `time.monotonic()`.
        """
        self._since = {rank: at for rank, at in self._since.items() if rank in processor_s}
        stuck = []
        for rank, used_s in processor_s.items():
            since = self._since.setdefault(rank, _Since(now, used_s))
            if used_s - since.processor_s > _SHARE * max(1.0, now - since.at):
                self._since[rank] = _Since(now, used_s)  # it gets on
            elif now - since.at >= STUCK_AFTER_S:
                stuck.append(rank)
        return stuck


def sleeping_s(ranks: Iterable[RankState]) -> dict[int, float]:
    """Return the processor time (s) of those ranks that sleep, as far as this machine knows."""
    found = {}
    for state in ranks:
        if not state.is_here:
            continue
        try:
            process = psutil.Process(state.pid)
            if process.status() in _WAITS:
                times = process.cpu_times()
                found[state.rank] = times.user + times.system
        except psutil.Error:
            continue  # it has ended, which is told elsewhere
    return found
