"""Ask the ranks what they do, while they do it, and keep what each said last and before.

The questions go to ipykernel's control thread on each rank, which answers also while the main
thread is stuck. A rank that does not answer is not asked again before it has.

Threads: main thread only; the answers are futures that the IO thread resolves.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from nbdist.client.faults.advice import A_CELL, WhatRan
from nbdist.client.faults.deadlock import Deadlock, prove
from nbdist.client.faults.rank_state import Inactive, RankState

_ROUND_S = 1.0  # a rank that has not answered by then is left out
_APART_S = 0.3  # between the two rounds of a proof


@dataclass(frozen=True, slots=True)
class Round:
    """What the ranks answered when they were asked once. Times are `time.monotonic()`."""

    began: float = 0.0
    ended: float = 0.0
    gone: Mapping[int, Inactive] = field(default_factory=dict)
    said: Mapping[int, RankState] = field(default_factory=dict)


class Poll:
    """The last two rounds of questions, and the one that is under way."""

    def __init__(self, ask: Callable[[int], "Future[Any]"]) -> None:
        """Begin without having asked.

        Args:
            ask: Sends `control.state` to a rank, on its control thread.
        """
        self.last = Round()
        self._before = Round()
        self._ask = ask
        self._open: dict[int, Future[Any]] = {}  # asked and not collected yet, also of old rounds
        self._asked_at = dict[int, float]()
        self._round: list[int] = []
        self._began = 0.0
        self._gone: dict[int, Inactive] = {}
        self._moved_at = time.monotonic()

    @property
    def moved_at(self) -> float:
        """When an answer last told that a rank had got on."""
        return self._moved_at

    def attend(
        self, ranks: Iterable[int], gone: Mapping[int, Inactive], every_s: float, now: float
    ) -> bool:
        """Collect answers, and ask again when it is time; return whether a round has just ended.

        Args:
            ranks: Those to ask: all that live.
            gone: Those of all ranks that launch nothing more.
            every_s: Time from the end of a round to the next.
            now: `time.monotonic()`.
        """
        if not self._round:
            if now >= self.last.ended + every_s:
                self._begin(ranks, gone, now)
            return False
        waited_for = [r for r in self._round if r in self._open and not self._open[r].done()]
        if waited_for and now < self._began + _ROUND_S:
            return False
        self._end(now)
        return True

    def ask_now(self, ranks: Iterable[int], gone: Mapping[int, Inactive], timeout_s: float) -> None:
        """Ask at once, and wait for the answers; the main thread does nothing else meanwhile.

        A rank that was asked a moment ago gives that answer first.
        """
        asked = list(ranks)
        until = time.monotonic() + timeout_s
        wait([self._open[rank] for rank in asked if rank in self._open], timeout_s)
        self._begin(asked, gone, time.monotonic())
        wait([self._open[rank] for rank in self._round], max(until - time.monotonic(), 0.0))
        self._end(time.monotonic())

    def deadlock(self, world: frozenset[int], ran: WhatRan = A_CELL) -> Deadlock | None:
        """Return what the last two rounds prove of what ran."""
        before, last = self._before, self.last
        if last.began < before.ended + _APART_S or last.gone != before.gone or not before.said:
            return None
        return prove(before.said, last.said, last.gone, world, ran)

    def waiting_since(self, began: float) -> set[int]:
        """Return the ranks that have said, asked since then, that they stand; also in this round.

        The others' answers need not be waited for: a loaded machine may take a second for them.
        """
        said = self.last.said if self.last.began >= began else {}
        found = {rank for rank, doing in said.items() if doing.stands}
        if not self._round or self._began < began:
            return found
        for rank in self._round:
            future = self._open[rank]
            is_told = future.done() and future.exception() is None
            if is_told and RankState.from_wire(future.result()).stands:
                found.add(rank)
        return found

    def silent(self, now: float) -> list[int]:
        """Return the ranks that owe an answer for a second or longer."""
        return sorted(
            rank
            for rank, future in self._open.items()
            if not future.done() and now > self._asked_at[rank] + _ROUND_S
        )

    def _begin(self, ranks: Iterable[int], gone: Mapping[int, Inactive], now: float) -> None:
        self._began, self._gone, self._round = now, dict(gone), []
        for rank in ranks:
            owed = self._open.get(rank)
            if owed is not None and not owed.done():
                continue
            self._open[rank] = self._ask(rank)
            self._asked_at[rank] = now
            self._round.append(rank)

    def _end(self, now: float) -> None:
        said = {}
        for rank in self._round:
            future = self._open[rank]
            if not future.done():
                continue
            del self._open[rank]
            if future.exception() is None:
                said[rank] = RankState.from_wire(future.result())
        for rank, doing in said.items():
            then = self.last.said.get(rank)
            if then is not None and then.progress != doing.progress:
                self._moved_at = now
        self._before, self.last = self.last, Round(self._began, now, self._gone, said)
        self._round = []
