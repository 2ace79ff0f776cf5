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
from nbdist.ranks import begin_with_ranks

_LONG_CALL_S = 1.5  # after an interrupt
_STILL_COMPUTES_S = 0.5  # after another rank's failure


class Commentary:
    """What is said about one cell. Main thread only."""

    def __init__(self, live: LiveText, cluster: Cluster) -> None:
        """Begin with nothing said."""
        self._live = live
        self._cluster = cluster
        self._warning: str | None = None
        self._has_warned = False
        self._killed: list[int] = []

    @property
    def has_warned(self) -> bool:
        """Whether what another interrupt does has been on the screen."""
        self._note_shown()
        return self._has_warned

    def _note_shown(self) -> None:
        if self._warning is not None and self._live.has_shown(self._warning):
            self._has_warned = True

    def killed(self, ranks: list[int]) -> None:
        """Show from now on that these ranks were killed."""
        self._killed = ranks

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
        said = watch.last.said
        computing = [rank for rank in running if rank in said and said[rank].wait is None]
        note = None
        if self._killed:
            note = f"{begin_with_ranks(self._killed)} did not stop: killed."
        elif interrupted_at is not None:
            if now > interrupted_at + _LONG_CALL_S:
                self._note_shown()  # before there is another text
                self._warning = explain.not_stopped(said, running)
            note = self._warning
        elif failed_at is not None:
            if now > failed_at + _STILL_COMPUTES_S and computing:
                note = explain.after_failure(culprits, computing)
        else:
            note = self._quiet_note(watch, running, gone, quiet_since, now)
        self._live.note(note)

    def end(self) -> None:
        """Show nothing any more: what was said of running ranks is over."""
        self._live.note(None)

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
