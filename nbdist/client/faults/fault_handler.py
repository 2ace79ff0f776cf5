"""What follows a fault: free the ranks that wait, and put the group together again.

1. A rank raised or died while others go on: after a short grace the others are asked, on their
   control threads, whether they wait in a collective. As soon as one does, and no bytes flow that
   may end a wait, every rank's links are cut: who waits gets an error at once; a rank in Python
   runs on to its next collective or the cell's end.
2. Ranks that wait for one that will never come, or for each other: proven (`deadlock`), it is a
   fault like any other.
3. Interrupt: every rank that runs is told to stop this cell, and no other. What does not settle
   waits in a collective, and is freed as above. A rank that still does not settle is inside one
   long C++ call: it is waited for, with a message that names it, and an interrupt after that
   message ends it, and no other. A rank that is interrupted alone fails as one that raises.
4. A rank that neither answers nor computes after a fault is ended: a lock of C++ that it waits
   for, with the GIL in hand, would hold the cell through the night.

While messages of all ranks come in, no rank is asked anything. What is merely slow is explained
after a quiet time, and continues.

Afterwards, when every main thread is idle, the group gets a new backend in the same objects.
"""

import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from nbdist.client.cluster.cluster import Cluster
from nbdist.client.cluster.patience import IdleProcesses, sleeping_s
from nbdist.client.faults import describe
from nbdist.client.faults.advice import WhatRan
from nbdist.client.faults.deadlock import Deadlock
from nbdist.client.faults.notes import CellNotes, silent_ranks
from nbdist.client.faults.poll import Poll
from nbdist.client.faults.rank_state import MEETING, Inactive, awaits_bytes
from nbdist.client.faults.recovery import repair
from nbdist.client.faults.repair_report import Repaired
from nbdist.client.faults.stderr_tail import LastOutput
from nbdist.client.output.live_text import LiveText
from nbdist.shared.wire import CellEnd

log = logging.getLogger(__name__)

GRACE_S = 0.1  # ranks that fail together reply within a few milliseconds of each other
INTERRUPT_GRACE_S = 0.25  # Python code stops within this after SIGINT
_CHILDREN_AFTER_S = 0.4  # a rank that has not stopped by then may wait for a command it started
_TIMEOUT_ASK_S = 2.0
# A wait that no rank can name (an operator the tap does not see, the tap switched off) is cut
# after this. A rank in Python is unharmed by that.
_PATIENCE_S = {"failed": 5.0, "interrupted": 1.0}
_CUT_TIMEOUT_S = 30.0
# How often ranks are asked, in seconds after the last answers.
_URGENT_S, _WAITING_S, _SILENT_S, _PARTLY_SILENT_S = 0.1, 0.3, 0.5, 2.0
# Ranks end a cell within this of each other. To ask them sooner made each cell a third slower.
_ENDING_S = 0.25
_STUCK_AFTER_S = 30.0
_WHY_STUCK = "nothing could free it: it neither answered nor computed after its links were cut"
# A rank that waits is free within milliseconds of the cut; but gloo forgets a message of which half
# has come, where the rest stays away. That wait would last as long as the group's timeout.
_FREE_WITHIN_S = 10.0
_WHY_NOT_FREE = "it still waited for its peers 10 s after its links were cut"
_SILENT_AFTER_S = 0.5  # training ranks send records twice as often


class FaultHandler:
    """The recovery of one cell. Main thread only."""

    def __init__(
        self, cluster: Cluster, live: LiveText, sent: Mapping[int, str], ran: WhatRan
    ) -> None:
        """Begin with nothing wrong.

        Args:
            cluster: Whose ranks run the cell.
            live: Shows lines to the person who waits.
            sent: For each rank that was sent the cell, the id of that message.
            ran: How it is called.
        """
        self._cut_at: float | None = None
        self.deadlock: Deadlock | None = None
        self.killed: list[int] = []  # by a second interrupt
        self._cluster = cluster
        self._sent = sent
        self._ran = ran
        self._watch = Poll(lambda rank: cluster.requests.ask(rank, "control.state", busy=True))
        self._failed_at: float | None = None
        self._interrupted_at: float | None = None
        self._told: dict[int, float] = {}  # ranks that were sent an interrupt, and when
        self._gone_count, self._gone_at = 0, 0.0  # how many ranks run no more; when it last grew
        self._passed_on: set[int] = set()  # ranks whose children were interrupted
        self._dead: list[int] = []  # ranks whose death the others were told of
        self._stuck = IdleProcesses(_STUCK_AFTER_S)
        self._commentary = CellNotes(live, cluster)
        self._cuts: list[Future[Any]] = []

    @property
    def cut(self) -> bool:
        """Whether the ranks' links were cut."""
        return self._cut_at is not None

    @property
    def interrupted(self) -> bool:
        """Whether the person asked the cell to stop."""
        return self._interrupted_at is not None

    @property
    def interrupted_alone(self) -> bool:
        """Whether the person asked some ranks to stop, and not the cell."""
        return bool(self._told) and not self.interrupted

    @property
    def interrupted_at(self) -> float:
        """When (`time.monotonic()`); after all else where it was not, or after the cell's end."""
        return math.inf if self._interrupted_at is None else self._interrupted_at

    def interrupt(self, running: Iterable[int]) -> None:
        """Pass an interrupt on to the ranks that run; a later one ends those named as deaf."""
        running = list(running)
        if self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
            self._cluster.events.note("interrupt", ranks=running)
            for rank in running:
                self._send_interrupt(rank)
            return
        deaf = [rank for rank in running if rank in self._commentary.named]
        if not deaf:
            return  # a double click, not a decision to lose what these ranks hold
        self._cluster.events.note("killed", "a second interrupt", ranks=deaf)
        self.killed += deaf
        self._commentary.killed(self.killed)
        for rank in deaf:
            self._cluster.kill(rank)

    def interrupt_alone(self, rank: int) -> None:
        """Interrupt one rank that runs, once: it raises, and its peers are released."""
        if rank not in self._told:
            self._cluster.events.note("interrupt", ranks=[rank])
            self._send_interrupt(rank)

    def _send_interrupt(self, rank: int) -> None:
        self._told[rank] = time.monotonic()
        self._cluster.signal(rank, signal.SIGCONT)  # a stopped process hears nothing else
        self._cluster.requests.interrupt(rank, self._sent[rank])

    def attend(
        self, running: list[int], gone: Mapping[int, Inactive], heard_at: Mapping[int, float]
    ) -> None:
        """Do what is due by now; called from the cell's loop, see `next_due`.

        Args:
            running: The ranks that run the cell.
            gone: The other ranks, and why they launch nothing more in it.
            heard_at: When the cell last heard of each running rank (`time.monotonic()`).
        """
        now = time.monotonic()
        faults = {rank: how for rank, how in gone.items() if how.is_fault}
        if faults and self._failed_at is None:
            self._failed_at = now
        if len(gone) > self._gone_count:
            self._gone_count, self._gone_at = len(gone), now
        if faults:
            self._tell_of_deaths()
        every_s = self._interval(gone, heard_at, now)
        if self._watch.attend(self._cluster.living(), gone, every_s, now):
            self._conclude()
        asked = {rank: self._told[rank] for rank in running if rank in self._told}
        if not self.cut and (
            self._is_failure_due(running, faults, now)
            or any(self._is_interrupt_due(rank, at, now) for rank, at in asked.items())
        ):
            self.cut_links()
        if self._cut_at is not None and not self.interrupted:
            self._end_stuck(running, self._cut_at, now)
        self._interrupt_children(r for r, at in asked.items() if now > at + _CHILDREN_AFTER_S)
        self._commentary.attend(
            self._watch,
            running,
            gone,
            # After a cut whoever waited is on its way.
            quiet_since=None if self.cut or self.interrupted else max(heard_at.values()),
            culprits={rank: how for rank, how in faults.items() if how.why != "freed"} or faults,
            failed_at=self._failed_at,
            interrupted_at=self._interrupted_at,
            cut_at=self._cut_at,
        )

    def settled(self) -> None:
        """No rank runs the cell any more: what was said of those that did is over."""
        self._commentary.end()

    def next_due(self) -> float:
        """Return in how many seconds `attend` should be called again at the latest."""
        is_urgent = self._failed_at is not None or bool(self._told)
        return 0.02 if is_urgent and not self.cut else 0.1

    def what_they_do(self, running: list[int], gone: Mapping[int, Inactive]) -> str:
        """Ask all ranks now, and return what the running ones do in a sentence's words."""
        self._watch.ask_now(self._cluster.living(), gone, _TIMEOUT_ASK_S)
        silent = silent_ranks(self._watch, self._cluster, time.monotonic())
        return describe.clauses(self._watch.last.said, running, gone, silent)

    def _interval(
        self, gone: Mapping[int, Inactive], heard_at: Mapping[int, float], now: float
    ) -> float:
        """Return how many seconds after the last answers the ranks are asked again."""
        if (self._failed_at is not None or self._told) and not self.cut:
            return _URGENT_S
        if self.interrupted:
            return _SILENT_S
        silent = [now > at + _SILENT_AFTER_S for at in heard_at.values()]
        if gone and now < self._gone_at + _ENDING_S:
            return math.inf
        if gone or all(silent):
            is_waiting = any(doing.wait for doing in self._watch.last.said.values())
            return _WAITING_S if is_waiting else _SILENT_S
        return _PARTLY_SILENT_S if any(silent) else math.inf

    def _conclude(self) -> None:
        """Cut the links when the answers prove that ranks can never go on."""
        if self.cut or self._failed_at is not None or self.interrupted:
            return
        deadlock = self._watch.deadlock(frozenset(self._cluster.ranks), self._ran)
        if deadlock is not None and self._let_meetings_end(deadlock):
            return
        self.deadlock = deadlock
        if self.deadlock is not None:
            self._cluster.events.note("deadlock", self.deadlock.text)
            self.cut_links()

    def _let_meetings_end(self, deadlock: Deadlock) -> bool:
        """Let the ranks of a deadlock that wait in `init_process_group` go on; are there any?

        A plain script would wait there for ever. Here the group is there: nothing has failed.
        """
        waits = {rank: self._watch.last.said[rank].wait for rank in deadlock.ranks}
        meetings = {rank: w.seq for rank, w in waits.items() if w and w.kind == MEETING}
        for rank, number in meetings.items():
            self._cluster.requests.ask(rank, "control.go_on", busy=True, number=number)
        return bool(meetings)

    def _is_failure_due(
        self, running: list[int], faults: Mapping[int, Inactive], now: float
    ) -> bool:
        """Return whether a rank waits for one that failed, and no bytes flow that could end it."""
        began, last = self._failed_at, self._watch.last
        if began is None or now < began + GRACE_S or last.began < began:
            return False
        doing = [last.said[rank] for rank in running if rank in last.said]
        world = frozenset(self._cluster.ranks)
        if any(awaits_bytes(one, faults, world) for one in doing):
            return False
        return self._may_be_unseen("failed", began, now) or any(one.stands for one in doing)

    def _is_interrupt_due(self, rank: int, began: float, now: float) -> bool:
        """Return whether a rank waits; bytes may flow, but the person wants it to stop."""
        if now < began + INTERRUPT_GRACE_S:
            return False
        waiting = self._watch.waiting_since(began)
        return self._may_be_unseen("interrupted", began, now) or rank in waiting

    def _may_be_unseen(self, what: str, began: float, now: float) -> bool:
        """Return whether a wait that no rank names has to be assumed."""
        is_off = self._cluster.options is not None and self._cluster.options.tap == "off"
        return is_off or now > began + _PATIENCE_S[what]

    def _end_stuck(self, running: list[int], cut_at: float, now: float) -> None:
        """End the ranks that nothing frees. Whoever has interrupted the cell decides himself."""
        for rank in self._watch.waiting_since(cut_at + _FREE_WITHIN_S).intersection(running):
            self._end(rank, _WHY_NOT_FREE)
        silent = set(self._watch.silent(now)).intersection(running)
        used_s = sleeping_s(self._cluster.ranks[rank] for rank in sorted(silent))
        for rank in self._stuck.attend(used_s, now):
            self._end(rank, _WHY_STUCK)

    def _end(self, rank: int, why: str) -> None:
        self._cluster.events.note("killed", why, ranks=[rank])
        self._cluster.kill(rank, why)

    def _tell_of_deaths(self) -> None:
        """Tell living ranks, once, whom none of their threads should wait for any more."""
        dead = self._cluster.dead()
        if dead != self._dead:
            self._dead = dead
            for rank in self._cluster.living():
                self._cluster.requests.ask(rank, "control.died", busy=True, ranks=dead)

    def _interrupt_children(self, running: Iterable[int]) -> None:
        """Interrupt what each rank waits for outside of Python, once."""
        for rank in running:
            if rank not in self._passed_on:
                self._passed_on.add(rank)
                self._cluster.requests.ask(
                    rank, "control.interrupt_children", busy=True, message=self._sent[rank]
                )

    def cut_links(self) -> None:
        """Cut every living rank's links, from its control thread; frees all that wait."""
        self._cut_at = time.monotonic()
        why = "interrupt" if self.interrupted else "deadlock" if self.deadlock else "a rank failed"
        self._cluster.events.note("cut links", why, generation=self._cluster.group.generation)
        self._cuts = [
            self._cluster.requests.ask(
                rank, "control.abort", busy=True, generation=self._cluster.group.generation
            )
            for rank in self._cluster.living()
        ]

    def finish(
        self,
        summaries: Mapping[int, CellEnd],
        reported: Iterable[int],
        last_words: Callable[[int], LastOutput],
    ) -> Repaired:
        """Put the ranks together again after a fault; every main thread is idle now.

        Also when no link was cut and all ranks agree: one may have lost a step, or stand in the
        midst of a backward as all others do.

        Args:
            summaries: Of the ranks that replied.
            reported: Ranks whose death the cell tells.
            last_words: Returns what a rank that died wrote last.

        Returns:
            What was done, as far as it is news.
        """
        # Every cut must be over before new links are made, or it would cut those. What a rank
        # answers that died, or did not answer at all, shows when the group is formed.
        wait(self._cuts, _CUT_TIMEOUT_S)
        is_news = self.cut or not agree(summaries)
        with self._commentary.replacing(self._cluster.dead()):
            return repair(self._cluster, is_news=is_news, reported=reported, last_words=last_words)


def agree(summaries: Mapping[int, CellEnd]) -> bool:
    """Return whether what ranks have launched meets what their peers have.

    Equally many collectives in each group they share, and each message received.
    """
    counts = {rank: summary.collectives for rank, summary in summaries.items()}
    names = {name for groups in counts.values() for name in groups}
    return all(
        len({groups[name] for groups in counts.values() if name in groups}) == 1 for name in names
    ) and all(_messages_meet(rank, summaries) for rank in summaries)


def _messages_meet(rank: int, summaries: Mapping[int, CellEnd]) -> bool:
    """Return whether what other ranks received of `rank` is what it sent them."""
    sent = summaries[rank].sent
    for peer, summary in summaries.items():
        received = {
            place.rpartition("/")[0]: n
            for place, n in summary.received.items()
            if place.endswith(f"/{rank}")
        }
        groups = {place.rpartition("/")[0] for place in sent if place.endswith(f"/{peer}")}
        for group in groups | received.keys():
            if f"{group}/any" in summary.received:
                continue  # whose those were is not known
            if sent.get(f"{group}/{peer}", 0) != received.get(group, 0):
                return False
    return True
