"""Tell the person who waits why nothing moves, or why a cell has not ended yet.

It is live text: what depends on time is not part of what a cell leaves behind. Where nothing is
live (`NBDIST_STATIC=1`, a terminal), a long wait and a rank that hears no interrupt are told in
lines that stay.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import psutil

from nbdist.client.cluster.cluster import Cluster
from nbdist.client.cluster.processes import RankProcess
from nbdist.client.faults import describe
from nbdist.client.faults.poll import Poll
from nbdist.client.faults.rank_state import PAUSED, Inactive, RankState, awaits_bytes
from nbdist.client.output.live_text import LiveText
from nbdist.shared.text import begin_with_ranks

_LONG_CALL_S = 1.5  # after an interrupt, for a rank that says that it computes
_ASKED_AFTER_S = 1.0  # after an interrupt: what a rank said before is no news
_FREED_WITHIN_S = 5.0  # on a machine that is loaded; for a rank that has waited, or does not answer
_PAUSED_S = 1.0  # what a rank said that has been heard of since is no news
_STILL_COMPUTES_S = 0.5  # after another rank's failure


class CellNotes:
    """What is said about one cell. Main thread only."""

    def __init__(self, live: LiveText, cluster: Cluster) -> None:
        """Begin with nothing said."""
        self._live = live
        self._cluster = cluster
        self._warning: str | None = None
        self._deaf: list[int] = []  # whom the warning names
        self._named: set[int] = set()
        self._waited: set[int] = set()  # ranks that have said so since the interrupt
        self._killed: list[int] = []
        self._told_quiet_s = 0.0

    @property
    def named(self) -> set[int]:
        """The ranks of which it was on the screen that another interrupt kills them."""
        self._note_shown()
        return set(self._named)

    def _note_shown(self) -> None:
        if self._warning is not None and self._live.has_shown(self._warning):
            self._named.update(self._deaf)

    def killed(self, ranks: list[int]) -> None:
        """Show that these ranks were killed, as long as they are there."""
        self._killed = ranks

    def attend(
        self,
        watch: Poll,
        running: list[int],
        gone: Mapping[int, Inactive],
        *,
        quiet_since: float | None,
        culprits: Mapping[int, Inactive],
        failed_at: float | None,
        interrupted_at: float | None,
        cut_at: float | None,
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
            cut_at: When the ranks' links were cut, so that who waits is freed.
        """
        now = time.monotonic()
        said = watch.last.said
        computing = [rank for rank in running if rank in said and said[rank].wait is None]
        note = None
        if dying := [rank for rank in self._killed if rank in running]:
            note = f"{begin_with_ranks(dying)} did not stop: killed."
        elif interrupted_at is not None:
            self._waited |= {rank for rank, doing in said.items() if doing.wait is not None}
            self._warn(watch, running, interrupted_at, cut_at, now)
            note = self._warning
        elif failed_at is not None:
            world = frozenset({*running, *gone})
            flowing = {
                rank: doing.wait
                for rank, doing in said.items()
                if doing.wait is not None
                and rank in running
                and cut_at is None
                and awaits_bytes(doing, culprits, world)
            }
            if now > failed_at + _STILL_COMPUTES_S and (computing or flowing):
                note = describe.after_failure(culprits, computing, flowing)
        else:
            note = self._quiet_note(watch, running, gone, quiet_since, now)
        self._live.note(note)

    def end(self) -> None:
        """Show nothing any more: what was said of running ranks is over."""
        self._live.note(None)

    @contextmanager
    def replacing(self, dead: Sequence[int]) -> Iterator[None]:
        """Show that dead ranks get new processes, for as long as that takes."""
        if dead:
            self._live.note(f"{begin_with_ranks(dead)} died: being replaced ...")
        try:
            yield
        finally:
            self._live.note(None)

    def _warn(
        self,
        watch: Poll,
        running: list[int],
        interrupted_at: float,
        cut_at: float | None,
        now: float,
    ) -> None:
        """Name the ranks that hear no interrupt."""
        self._note_shown()  # before there is another text
        before = set(self._deaf)
        is_news = watch.last.began >= interrupted_at + _ASKED_AFTER_S
        self._deaf = deaf(
            running,
            watch.last.said if is_news else {},
            self._waited,
            for_s=now - interrupted_at,
            freed_for_s=0.0 if cut_at is None else now - max(cut_at, interrupted_at),
        )
        self._warning = describe.not_stopped(watch.last.said, self._deaf) if self._deaf else None
        if self._warning is not None and not before.issuperset(self._deaf):
            self._live.tell(self._warning)

    def _quiet_note(
        self,
        watch: Poll,
        running: list[int],
        gone: Mapping[int, Inactive],
        since: float | None,
        now: float,
    ) -> str | None:
        quiet_s = self._cluster.options.quiet if self._cluster.options else 0.0
        if since is None or not quiet_s:
            return None
        running_said = [watch.last.said[rank] for rank in running if rank in watch.last.said]
        paused = {doing.step for doing in running_said if doing.word == PAUSED}
        if paused and now > since + _PAUSED_S:
            return describe.paused_note(max(paused))
        for_s = now - max(since, watch.moved_at)
        if for_s < quiet_s:
            self._told_quiet_s = 0.0  # what comes is another wait
            return None
        said, silent = watch.last.said, silent_ranks(watch, self._cluster, now)
        if not silent and not any(said[rank].wait for rank in running if rank in said):
            return None
        note = describe.quiet_note(for_s, said, running, gone, silent)
        if for_s >= 2 * self._told_quiet_s:
            self._told_quiet_s = for_s
            self._live.tell(note)
        return note


def deaf(
    running: Iterable[int],
    said: Mapping[int, RankState],
    waited: Collection[int],
    *,
    for_s: float,
    freed_for_s: float,
) -> list[int]:
    """Return the ranks that an interrupt does not stop, as far as that is known.

    A rank that only waits is being freed, and one that was freed is on its way; on a machine that
    is loaded that takes a while, as does an answer. A rank is deaf when it says that it computes
    the cell, or when freeing it should be over.

    Args:
        running: The ranks that run the cell.
        said: What they said when asked long enough after the interrupt.
        waited: Ranks that have waited for others since the interrupt.
        for_s: Since the interrupt.
        freed_for_s: Since the interrupt and the cut of all links.
    """
    if freed_for_s > _FREED_WITHIN_S:
        return list(running)
    return [
        rank
        for rank in running
        if for_s > _LONG_CALL_S
        and rank not in waited
        and rank in said
        and said[rank].wait is None
        and said[rank].line is not None
    ]


def silent_ranks(watch: Poll, cluster: Cluster, now: float) -> dict[int, str]:
    """Return the ranks that do not answer, each with what its process is known to do."""
    return {rank: process_word(cluster.ranks[rank]) for rank in watch.silent(now)}


def process_word(rank: RankProcess) -> str:
    """Return why a rank may not answer, where that can be seen: on this machine alone."""
    if not rank.is_here:
        return ""
    try:
        status = psutil.Process(rank.pid).status()
    except psutil.Error:
        return ""
    return {
        psutil.STATUS_STOPPED: "stopped (SIGSTOP?)",
        psutil.STATUS_TRACING_STOP: "held by a debugger",
        psutil.STATUS_DISK_SLEEP: "waiting for a disk",
    }.get(status, "")
