"""Tell the person who waits why nothing moves, or why a cell has not ended yet.

All of it is live text: what depends on time is not part of what a cell leaves behind.
"""

import time
from collections.abc import Mapping

import psutil

from nbdist.client import explain
from nbdist.client.cluster import Cluster
from nbdist.client.doing import Gone
from nbdist.client.live import LiveText
from nbdist.client.watch import Watch

_LONG_CALL_S = 3.0  # after an interrupt
_STILL_COMPUTES_S = 0.5  # after another rank's failure


class Commentary:
    """What is said about one cell. Main thread only."""

    def __init__(self, live: LiveText, cluster: Cluster) -> None:
        """Begin with nothing said."""
        self.say = live.say
        self._live = live
        self._cluster = cluster
        self._told: set[str] = set()

    def attend(
        self,
        watch: Watch,
        running: list[int],
        gone: Mapping[int, Gone],
        *,
        quiet_since: float | None,
        culprits: Mapping[int, Gone],
        failed_at: float | None,
        interrupted_at: float | None,
    ) -> None:
        """Show what is worth knowing by now. Times are `time.monotonic()`.

        Args:
            watch: What the ranks said.
            running: The ranks that run the cell.
            gone: The other ranks.
            quiet_since: When a rank was last heard of; None when quiet needs no explanation.
            culprits: The ranks that failed or died of themselves.
            failed_at: When a rank failed or died.
            interrupted_at: When the person interrupted the cell.
        """
        now = time.monotonic()
        if self._is_first("long call", interrupted_at, _LONG_CALL_S, now):
            self.say(explain.not_stopped(watch.last.said, running))
        if interrupted_at is None and self._is_first("computes", failed_at, _STILL_COMPUTES_S, now):
            self.say(explain.after_failure(culprits, running))
        self._live.note(self._quiet_note(watch, running, gone, quiet_since, now))

    def _quiet_note(
        self,
        watch: Watch,
        running: list[int],
        gone: Mapping[int, Gone],
        since: float | None,
        now: float,
    ) -> str | None:
        quiet_s = self._cluster.options.quiet_s if self._cluster.options else 0.0
        if since is None or not quiet_s:
            return None
        for_s = now - max(since, watch.moved_at)
        if for_s < quiet_s:
            return None
        said, silent = watch.last.said, silent_ranks(watch, self._cluster, now)
        if not silent and not any(said[rank].wait for rank in running if rank in said):
            return None
        return explain.quiet_note(for_s, said, running, gone, silent)

    def _is_first(self, what: str, began: float | None, after_s: float, now: float) -> bool:
        """Return True once, when this has gone on for so long."""
        if began is None or now < began + after_s or what in self._told:
            return False
        self._told.add(what)
        return True


def silent_ranks(watch: Watch, cluster: Cluster, now: float) -> dict[int, str]:
    """Return the ranks that do not answer, each with what its process is known to do."""
    return {rank: process_word(cluster.ranks[rank].pid) for rank in watch.silent(now)}


def process_word(pid: int) -> str:
    """Return why a process of this machine may not answer, where that can be seen."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return ""
    return {
        psutil.STATUS_STOPPED: "stopped (SIGSTOP?)",
        psutil.STATUS_TRACING_STOP: "held by a debugger",
        psutil.STATUS_DISK_SLEEP: "waiting for a disk",
    }.get(status, "")
