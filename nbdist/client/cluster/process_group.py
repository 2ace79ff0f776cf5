"""The process group of all ranks, as the notebook asks for it: joined, re-created, left.

Each forming has a *generation*, and none is used twice. When one rank fails in it, all are freed,
so that the next generation can begin at once.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import asdict
from typing import Any

from nbdist.client.cluster.events import EventLog
from nbdist.client.cluster.patience import FAR_S, HANGS_AFTER_S, IdleProcesses
from nbdist.client.cluster.requests import Requests, gather
from nbdist.shared import wire
from nbdist.shared.errors import ClusterError
from nbdist.shared.options import ClusterOptions
from nbdist.shared.placement import HERE, RankPlacement
from nbdist.shared.text import begin_with_ranks

_LEAVE_TIMEOUT_S = 30.0
_FREE_TIMEOUT_S = 30.0
_WAKE_EVERY_S = 1.0

Answers = dict[int, dict[str, Any]]


class ProcessGroup:
    """Which generation of the group there is, and how its ranks come to be in it."""

    def __init__(
        self,
        requests: Requests,
        events: EventLog,
        living: Callable[[], list[int]],
        wake: Callable[[int], None],
        sleeping_s: Callable[[Iterable[int]], Mapping[int, float]],
    ) -> None:
        """Begin with no group.

        Args:
            requests: To the ranks.
            events: Where it is written down.
            living: Returns the ranks that are alive.
            wake: Continues a rank that was stopped (SIGSTOP).
            sleeping_s: Returns the processor time (s) of those ranks that sleep on this machine.
        """
        self.generation = 0
        self.places: Mapping[int, RankPlacement] = {}  # of all ranks; the launcher's word
        self._first_group = 0  # the default group's number; see `group.join` of the engine
        self._store_port = 0
        self._requests = requests
        self._events = events
        self._living = living
        self._wake = wake
        self._sleeping_s = sleeping_s

    def begin(self, options: ClusterOptions, store_port: int) -> Answers:
        """Let all ranks of a new cluster join; the store listens on `store_port`.

        Returns and raises as `recover`, but ranks that begin together have nothing to recover.
        """
        self.generation = self._first_group = 0
        self._store_port = store_port
        return self._join(options, range(options.n), (), {})

    def memory(self) -> dict[str, Any]:
        """Return what another kernel's `adopt`s: JSON-like."""
        return {
            "generation": self.generation,
            "first_group": self._first_group,
            "store_port": self._store_port,
            "places": [[rank, place.to_wire()] for rank, place in self.places.items()],
        }

    def adopt(self, memory: Mapping[str, Any], generations: Iterable[int]) -> None:
        """Go on with the group that another kernel knew.

        Args:
            memory: What `memory` returned there.
            generations: Where ranks are now: that kernel may have ended in the midst of a recovery.
        """
        self.generation = max(memory["generation"], *generations, 0)
        self._first_group = memory["first_group"]
        self._store_port = memory["store_port"]
        self.places = {rank: RankPlacement(**place) for rank, place in memory["places"]}

    def recover(self, options: ClusterOptions, replacements: Iterable[int]) -> Answers:
        """Form the group of all ranks again and bring them to one state; main threads are idle.

        Args:
            options: Of the cluster.
            replacements: Ranks whose processes are new and have joined no group yet.

        Returns:
            What each rank answers, see `engine/recovery/recovery.py`.

        Raises:
            ClusterError: A rank is dead, failed meanwhile, or did not answer in time. The group is
                unusable then; the next call begins again, with a new generation.
        """
        self.generation += 1
        new = sorted(replacements)
        survivors = [rank for rank in range(options.n) if rank not in new]
        peers = [(rank, place.peer) for rank, place in self.places.items()]
        pending: dict[int, Future[Any]] = {
            rank: self._requests.ask(
                rank, "group.recover", generation=self.generation, replacements=new, peers=peers
            )
            for rank in survivors
        }
        return self._join(options, new, new if survivors else (), pending)

    def leave(self, ranks: Iterable[int]) -> Answers:
        """Let ranks leave all their groups, for `form`; see `engine/recovery/resize.py`."""
        answers: Answers = self._requests.ask_all(ranks, "group.leave", timeout_s=_LEAVE_TIMEOUT_S)
        self._first_group = max(answer["groups"] for answer in answers.values())
        return answers

    def form(self, options: ClusterOptions, replacements: Sequence[int]) -> Answers:
        """Let ranks that have left all groups, and new ranks, form the group of `options.n` ranks.

        Returns and raises as `recover`.
        """
        self.generation += 1
        return self._join(options, range(options.n), replacements, {})

    def _join(
        self,
        options: ClusterOptions,
        ranks: Iterable[int],
        replacements: Sequence[int],
        pending: dict[int, "Future[Any]"],
    ) -> Answers:
        """Let `ranks` join the group, and wait for them and for what is `pending` of the others."""
        began = time.monotonic()
        try:
            for rank in ranks:
                pending[rank] = self._ask_to_join(options, rank, replacements)
            self._wake_until_done(pending)
            answers: Answers = gather(pending, "the call to form the group", 0.0)
        except BaseException as error:
            self._events.note("not re-formed", type(error).__name__, generation=self.generation)
            self._free(pending)
            raise
        self._note(answers, replacements, round((time.monotonic() - began) * 1000, 1))
        return answers

    def _ask_to_join(
        self, options: ClusterOptions, rank: int, replacements: Sequence[int]
    ) -> "Future[Any]":
        return self._requests.ask(
            rank,
            "boot.join",
            version=wire.VERSION,
            options=asdict(options),
            place=self.places[rank].to_wire(),
            store_port=self._store_port,
            generation=self.generation,
            replacements=list(replacements),
            first_group=self._first_group,
        )

    def _wake_until_done(self, pending: Mapping[int, "Future[Any]"]) -> None:
        """Wait while ranks make progress; continue those that were stopped before or meanwhile.

        A rank that imports torch, or copies all that another holds, makes progress. Those that
        wait for it do not: only where no rank does the wait has an end.

        Raises:
            ClusterError: No rank makes progress.
        """
        begins, idle = time.monotonic(), IdleProcesses(HANGS_AFTER_S)
        late = set(pending)
        while late and not any(f.done() and f.exception() for f in pending.values()):
            for rank in late:
                self._wake(rank)
            wait([pending[rank] for rank in late], _WAKE_EVERY_S, FIRST_EXCEPTION)
            late = {rank for rank, future in pending.items() if not future.done()}
            now = time.monotonic()
            hang = set(idle.attend(self._sleeping_s(late), now))
            far = {rank for rank in late if self.places[rank].host != HERE}
            if late and late <= (hang | far if now > begins + FAR_S else hang):
                raise ClusterError(
                    f"{begin_with_ranks(late)} did not come to the group that is formed.",
                    why=f"no rank has got on for {FAR_S if far else HANGS_AFTER_S:.0f} s.",
                    do="%dist restart",
                )

    def _free(self, pending: Mapping[int, "Future[Any]"]) -> None:
        """Free ranks that wait for one that has failed, so that they can begin again.

        More than once: a rank that has not begun with this generation takes no order to leave it.
        """
        deadline = time.monotonic() + _FREE_TIMEOUT_S
        while time.monotonic() < deadline:
            living = set(self._living())
            stuck = [rank for rank, f in pending.items() if rank in living and not f.done()]
            if not stuck:
                return
            for rank in stuck:
                self._wake(rank)
                self._requests.ask(rank, "control.abort", busy=True, generation=self.generation)
            wait([pending[rank] for rank in stuck], 0.1)

    def _note(self, answers: Answers, replacements: Sequence[int], ms: float) -> None:
        lost = max((answer.get("steps_lost", 0) for answer in answers.values()), default=0)
        what = "re-formed" if self.generation else "joined"
        self._events.note(
            what, generation=self.generation, ranks=sorted(answers), ms=ms, steps_lost=lost
        )
        for line in dict.fromkeys(line for a in answers.values() for line in a.get("agreed") or ()):
            self._events.note("agreed", line)
        for rank in replacements:
            if cloned := answers[rank].get("cloned"):
                names, left_out = len(cloned["names"]), len(cloned["placeholders"])
                facts = {"rank": rank, "source": cloned["source"]}
                self._events.note("cloned", **facts, names=names, left_out=left_out)
