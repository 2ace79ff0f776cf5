"""What follows a fault: free the ranks that wait, and put the group together again.

1. A rank raised while others go on: after a short grace, every rank's links are cut from its
   control thread. A rank that waits in a collective gets an error at once; a rank in Python
   runs on to its next collective or the cell's end.
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
from concurrent.futures import Future
from typing import Any

from nbdist.client.cluster import Cluster
from nbdist.errors import ClusterError
from nbdist.ranks import name_ranks

log = logging.getLogger(__name__)

GRACE_S = 0.1  # ranks that fail together reply within a few milliseconds of each other
INTERRUPT_GRACE_S = 0.25  # Python code stops within this after SIGINT
_REFORM_TIMEOUT_S = 30.0


class Rescue:
    """The recovery of one cell. Main thread only."""

    def __init__(self, cluster: Cluster, say: Callable[[str], None]) -> None:
        """Begin with nothing wrong.

        Args:
            cluster: Whose ranks run the cell.
            say: Shows one line to the person who waits.
        """
        self.cut = False
        self.killed: set[int] = set()
        self._cluster = cluster
        self._say = say
        self._failed_at: float | None = None
        self._interrupted_at: float | None = None
        self._told = False
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
            for rank in running:
                self._cluster.signal(rank, signal.SIGINT)
            return
        self._say(f"{_sentence(running)} did not stop, and is ended now.")
        for rank in running:
            self.killed.add(rank)
            self._cluster.kill(rank)

    def attend(self, running: Iterable[int]) -> None:
        """Do what is due by now; called from the cell's loop every 100 ms or so."""
        now = time.monotonic()
        due = [
            began + grace
            for began, grace in (
                (self._failed_at, GRACE_S),
                (self._interrupted_at, INTERRUPT_GRACE_S),
            )
            if began is not None
        ]
        if due and not self.cut and now >= min(due):
            self.cut_links()
        if self._interrupted_at is not None and now > self._interrupted_at + 3.0 and not self._told:
            self._told = True
            self._say(
                f"{_sentence(running)} is inside one long call and stops when it ends. "
                "Interrupt again to end the process instead; its variables are lost then."
            )

    def next_due(self) -> float:
        """Return in how many seconds `attend` should be called again."""
        now = time.monotonic()
        dues = [0.1]
        if not self.cut:
            if self._failed_at is not None:
                dues.append(self._failed_at + GRACE_S - now)
            if self._interrupted_at is not None:
                dues.append(self._interrupted_at + INTERRUPT_GRACE_S - now)
        return max(0.001, min(dues))

    def cut_links(self) -> None:
        """Cut every living rank's links, from its control thread; frees all that wait."""
        self.cut = True
        self._cuts = [
            self._cluster.request(
                rank, "control.abort", busy=True, generation=self._cluster.generation
            )
            for rank in self._cluster.living()
        ]

    def finish(self, counts: Mapping[int, Mapping[str, int]]) -> list[str]:
        """Re-form the group where it is needed; every main thread is idle now.

        Args:
            counts: Each rank's collectives by group, from its reply.

        Returns:
            Sentences about what was done, for the error's text.
        """
        dead = self._cluster.dead()
        if dead:
            return [
                f"{name_ranks(dead)} must be replaced before the next collective: "
                f"%dist restart -r {','.join(map(str, dead))}"
            ]
        if not self.cut and agree(counts):
            return []
        for future in self._cuts:
            # Every cut must be over before new links are made, or it would cut those.
            future.result(_REFORM_TIMEOUT_S)
        try:
            self._cluster.reform(_REFORM_TIMEOUT_S)
        except Exception as error:
            log.exception("The group could not be re-formed")
            self._cluster.broken = "The process group could not be re-formed after a fault."
            raise ClusterError(self._cluster.broken, why=str(error), do="%dist restart") from error
        return ["The group was formed anew; all variables are kept."]


def agree(counts: Mapping[int, Mapping[str, int]]) -> bool:
    """Return whether ranks have launched equally many collectives in each group they share.

    Args:
        counts: Rank to group name to number of collectives since the group was formed.
    """
    names = {name for groups in counts.values() for name in groups}
    return all(
        len({groups[name] for groups in counts.values() if name in groups}) == 1 for name in names
    )


def _sentence(ranks: Iterable[int]) -> str:
    text = name_ranks(ranks)
    return text[0].upper() + text[1:]
