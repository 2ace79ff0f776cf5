"""What follows a fault: free the ranks that wait, and put the group together again.

1. A rank raised while others go on: after a short grace the others are asked, on their control
   threads, whether they wait in a collective. As soon as one does, every rank's links are cut:
   who waits gets an error at once; a rank in Python runs on to its next collective or the
   cell's end.
2. Interrupt: SIGINT to every rank that runs. What does not settle waits in a collective, and is
   freed as above.
3. A rank that still does not settle is inside one long C++ call: it is waited for, with a
   message, and a second interrupt ends it.

Afterwards, when every main thread is idle, the group gets a new backend in the same objects.
"""

import logging
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from nbdist.client.cluster import Cluster
from nbdist.client.repair import Repaired, repair
from nbdist.ranks import begin_with_ranks, name_ranks

log = logging.getLogger(__name__)

GRACE_S = 0.1  # ranks that fail together reply within a few milliseconds of each other
INTERRUPT_GRACE_S = 0.25  # Python code stops within this after SIGINT
_LONG_WAIT_S = 2.0
_SECOND_THOUGHT_S = 1.0
_ASK_AGAIN_S = 0.1
# A wait that no rank can name (an operator the tap does not see, the tap switched off, the
# store) is cut after this. A rank in Python is unharmed by that.
_PATIENCE_S = {"failed": 5.0, "interrupted": 1.0}
_CUT_TIMEOUT_S = 30.0


class Rescue:
    """The recovery of one cell. Main thread only."""

    def __init__(
        self, cluster: Cluster, say: Callable[[str], None], absent: Iterable[int] = ()
    ) -> None:
        """Begin with nothing wrong.

        Args:
            cluster: Whose ranks run the cell.
            say: Shows one line to the person who waits.
            absent: Ranks that are not in this cell.
        """
        self._absent = list(absent)
        self._explained = not self._absent
        self.cut = False
        self._cluster = cluster
        self._say = say
        self._failed_at: float | None = None
        self._interrupted_at: float | None = None
        self._told = False
        self._asked: list[Future[Any]] = []
        self._asked_at = 0.0
        self._cuts: list[Future[Any]] = []

    @property
    def interrupted(self) -> bool:
        """Whether the person asked the cell to stop."""
        return self._interrupted_at is not None

    def rank_failed(self) -> None:
        """Note that a rank has failed while others still run."""
        if self._failed_at is None:
            self._failed_at = time.monotonic()

    def interrupt(self, running: Iterable[int]) -> None:
        """Pass an interrupt on to the ranks that run; a second one ends those that are stuck."""
        running = list(running)
        if self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
            self._cluster.events.note("interrupt", ranks=running)
            for rank in running:
                self._cluster.signal(rank, signal.SIGINT)
            return
        if time.monotonic() - self._interrupted_at < _SECOND_THOUGHT_S:
            return  # a double click, not a decision to lose what these ranks hold
        self._cluster.events.note("killed", "a second interrupt", ranks=running)
        self._say(f"{begin_with_ranks(running)} did not stop: killed.")
        for rank in running:
            self._cluster.kill(rank)

    def attend(self, running: Iterable[int]) -> None:
        """Do what is due by now; called from the cell's loop, see `next_due`."""
        running = list(running)
        now = time.monotonic()
        if not self.cut and (
            self._is_due(running, "failed", self._failed_at, GRACE_S, now)
            or self._is_due(running, "interrupted", self._interrupted_at, INTERRUPT_GRACE_S, now)
        ):
            self.cut_links()
        if self._interrupted_at is not None and now > self._interrupted_at + 3.0 and not self._told:
            self._told = True
            self._say(
                f"{begin_with_ranks(running, be=True)} inside one long call; the interrupt waits "
                "for its end. Interrupt again to kill instead: variables there are lost then."
            )

    def explain(self, running: Iterable[int]) -> None:
        """Say once when a rank has long waited in a cell that leaves ranks out."""
        if self._explained:
            return
        now = time.monotonic()
        waits = [f.result()["waiting"] for f in self._asked if _waits(f)]
        long = [wait for wait in waits if wait["seconds"] > _LONG_WAIT_S]
        if long:
            self._explained = True
            self._say(
                f"A rank waits in {long[0]['kind']}, and {name_ranks(self._absent)} "
                f"{'is' if len(self._absent) == 1 else 'are'} not in this cell (-r). If it waits "
                "for one of those, interrupt the kernel: all variables are kept."
            )
        elif now > self._asked_at + _LONG_WAIT_S and all(f.done() for f in self._asked):
            self._ask(running, now)

    def _ask(self, running: Iterable[int], now: float) -> None:
        self._asked_at = now
        self._asked = [
            self._cluster.requests.ask(rank, "control.state", busy=True) for rank in running
        ]

    def next_due(self) -> float:
        """Return in how many seconds `attend` should be called again at the latest."""
        is_urgent = self._failed_at is not None or self._interrupted_at is not None
        return 0.02 if is_urgent and not self.cut else 0.1

    def _is_due(
        self, running: list[int], what: str, began: float | None, grace: float, now: float
    ) -> bool:
        """Return whether a rank that runs waits for one that will never come."""
        if began is None or now < began + grace:
            return False
        if self._cluster.options and self._cluster.options.tap == "off":
            return True
        if now > began + _PATIENCE_S[what]:
            return True
        if any(_waits(future) for future in self._asked):
            return True
        if now > self._asked_at + _ASK_AGAIN_S and all(f.done() for f in self._asked):
            self._ask(running, now)
        return False

    def cut_links(self) -> None:
        """Cut every living rank's links, from its control thread; frees all that wait."""
        self.cut = True
        self._cluster.events.note("cut links", generation=self._cluster.generation)
        self._cuts = [
            self._cluster.requests.ask(
                rank, "control.abort", busy=True, generation=self._cluster.generation
            )
            for rank in self._cluster.living()
        ]

    def finish(self, counts: Mapping[int, Mapping[str, int]]) -> Repaired:
        """Put the ranks together again where it is needed; every main thread is idle now.

        Args:
            counts: Each rank's collectives by group, from its reply.

        Returns:
            What was done; nothing when nothing was amiss.
        """
        if not self._cluster.dead() and not self.cut and agree(counts):
            return Repaired()
        # Every cut must be over before new links are made, or it would cut those. What a rank
        # answers that died, or did not answer at all, shows when the group is formed.
        wait(self._cuts, _CUT_TIMEOUT_S)
        return repair(self._cluster)


def _waits(answer: Future[Any]) -> bool:
    """Return whether a rank has answered that its main thread waits in a collective."""
    if not answer.done() or answer.exception() is not None:
        return False
    return answer.result()["waiting"] is not None


def agree(counts: Mapping[int, Mapping[str, int]]) -> bool:
    """Return whether ranks have launched equally many collectives in each group they share.

    Args:
        counts: Rank to group name to number of collectives since the group was formed.
    """
    names = {name for groups in counts.values() for name in groups}
    return all(
        len({groups[name] for groups in counts.values() if name in groups}) == 1 for name in names
    )
