"""Follow a cell that another kernel has sent: receive the rest, fetch what was missed, end it.

What ranks publish reaches every kernel that is connected, under the id of the message that the cell
came by. What they published before, each keeps for us (`engine/kernel/ipython/journal.py`), with
its reply, which went to a kernel that is gone. Messages that come both ways have the same id.

Threads: `Missed.hear` runs on ipyparallel's IO thread; everything else on the main one.
"""

import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Final

from nbdist.client.cells.listener import RankListener
from nbdist.client.cells.run import ENDED_BEFORE, CellRun
from nbdist.client.cluster.connection import Message
from nbdist.client.output.terminal import RankOutput
from nbdist.shared import wire
from nbdist.shared.errors import NBDistError
from nbdist.shared.text import counted, name_ranks

_ASK_EVERY_S: Final = 1.0  # whether a rank has ended; that it has is also published
_FETCH_S: Final = 60.0
_RECORDS_A_CALL: Final = 1000
_UNKNOWN_S: Final = 5.0  # for a cell that was sent as its kernel died to begin on a rank
_LOST = {"status": "aborted"}


class Missed:
    """Puts what one rank has sent before we listened before what it sends from now on."""

    def __init__(self, collector: RankListener) -> None:
        """Begin to hold what comes."""
        self._collector = collector
        self._lock = threading.Lock()
        self._held: list[Message] | None = []
        self._seen: set[str] = set()
        self._newest: tuple[str, Any] = "", None  # its id, and the window that it is of

    def hear(self, message: Message) -> None:
        """Take a message that is published now."""
        with self._lock:
            if self._held is not None:
                self._held.append(message)
                return
        self._take(message)

    def fill(self, sent: list[list[Any]]) -> None:
        """Take what was sent so far, then what was held; from now on all goes through."""
        for of, kind, content in sent:
            self._take(Message(kind, content, {}, [], False, of))
        while held := self._take_held():  # not under the lock, for which `hear` would wait
            for message in held:
                self._take(message)

    def _take_held(self) -> list[Message]:
        """Return what has been held since; without any, all goes through from here on."""
        with self._lock:
            held, self._held = self._held or [], []
            if not held:
                self._held = None
            return held

    def has_all(self, sent: list[list[Any]]) -> bool:
        """Return whether all of these have come."""
        return all(of in self._seen for of, _, _ in sent)

    def note(self, sent: list[list[Any]]) -> None:
        """Pass over these from now on: they have been shown."""
        self._seen.update(of for of, _, _ in sent)

    def _take(self, message: Message) -> None:
        if message.id not in self._seen:
            if message.kind in wire.SHOWN:
                newest, window = self._newest
                self._newest = message.id, message.content.get("window")
                if window is not None and window == self._newest[1]:
                    self._seen.discard(newest)  # the journal keeps the newest of them, too
                self._seen.add(message.id)
            self._collector.on_message(message)


class AttachedCell(CellRun):
    """A cell of another kernel; made like a `CellRun`, then `follow` is called."""

    def follow(self, memory: Mapping[str, Any]) -> None:
        """Continue the cell that the keeper remembered; see `CellAttempt.memory`."""
        self._memory = memory
        self._sent.update({int(rank): of for rank, of in memory["messages"].items()})
        self._ran_before_s = max(0.0, time.time() - memory["began"])
        self._missed = {rank: Missed(c) for rank, c in self._collectors.items()}
        self._asked: dict[int, tuple[float, Future[Any] | None]] = {}
        self._unknown_since: dict[int, float] = {}
        self.gone: list[str] = []  # what can no longer be fetched, in sentences

    def _begin(self, start: wire.CellStart) -> None:
        del start  # ranks have it
        for rank, missed in self._missed.items():
            if rank in self._sent:
                self._cluster.requests.hear(self._sent[rank], missed.hear)
        for rank, collector in self._collectors.items():
            state = self._cluster.ranks[rank]
            if not state.alive or rank not in self._sent:
                collector.died(state.ended or ENDED_BEFORE)
        if self._cluster.memory is not None:
            self._cluster.memory.cell_began({**self._memory, "kernel": os.getpid()})
        self._catch_up(self._running())

    def _catch_up(self, ranks: list[int]) -> None:
        """Fetch what ranks have shown and recorded so far."""
        pending = {rank: self._ask(rank, whole=True) for rank in ranks}
        wait(pending.values(), _FETCH_S)
        # A rank that does not answer has died, which is reported elsewhere, or is asked again.
        answers = {r: f.result() for r, f in pending.items() if f.done() and f.exception() is None}
        known = {rank: of_rank for rank, of_rank in answers.items() if of_rank["known"]}
        for rank, of_rank in known.items():
            self._telemetry.receive(wire.Batch(rank, (), of_rank["facts"]))
        self._fetch({r: (of["first_seq"], of["next_seq"]) for r, of in known.items()})
        for rank in ranks:
            self._missed[rank].fill(known[rank]["sent"] if rank in known else [])
        for rank, of_rank in answers.items():
            self._note_dropped(rank, of_rank)
            self._take_reply(rank, of_rank)

    def _fetch(self, bounds: Mapping[int, tuple[int, int]]) -> None:
        """Fetch records, some of each rank in turn: steps are explained by comparing ranks.

        Those that it has no time for are fetched when the cell ends.
        """
        deadline = time.monotonic() + _FETCH_S
        at = {rank: first for rank, (first, _) in bounds.items()}
        while left := [rank for rank, (_, after) in bounds.items() if at[rank] < after]:
            if time.monotonic() > deadline:
                break
            for rank in left:
                first, at[rank] = at[rank], min(at[rank] + _RECORDS_A_CALL, bounds[rank][1])
                self._fetch_records(rank, first, at[rank], deadline, busy=True)
        asked = {rank: (first, at[rank]) for rank, (first, _) in bounds.items()}
        for rank, missing in self._telemetry.gaps(asked).items():
            count = sum(end - begin for begin, end in missing)
            self.gone.append(
                f"{counted(count, 'record')} of rank {rank} {'is' if count == 1 else 'are'} gone: "
                "ranks keep the newest, and no notebook was attached."
            )

    def _note_dropped(self, rank: int, answer: Mapping[str, Any]) -> None:
        if dropped := answer["dropped"]:
            self.gone.append(
                f"{counted(dropped, 'output')} of {name_ranks([rank])} "
                f"{'is' if dropped == 1 else 'are'} gone: ranks keep the newest."
            )

    def _ask(self, rank: int, *, whole: bool = False) -> "Future[Any]":
        message = self._sent[rank]
        return self._cluster.requests.ask(
            rank, "boot.missed", busy=True, message=message, whole=whole
        )

    def _look(self, running: list[int]) -> None:
        """Ask ranks whether they have ended: what they reply is for another kernel."""
        now = time.monotonic()
        for rank in running:
            at, future = self._asked.get(rank, (0.0, None))
            if future is not None and future.done():
                if future.exception() is None:
                    self._take_reply(rank, future.result())
                self._asked[rank] = at, None
            elif future is None and (
                now - at > _ASK_EVERY_S or self._collectors[rank].idle.is_set()
            ):
                self._asked[rank] = now, self._ask(rank)

    def _take_reply(self, rank: int, answer: Mapping[str, Any]) -> None:
        collector, reply = self._collectors[rank], answer["reply"]
        if not answer["known"]:
            since = self._unknown_since.setdefault(rank, time.monotonic())
            reply = _LOST if time.monotonic() - since > _UNKNOWN_S else None
        if reply is not None and not collector.settled:
            collector.on_message(Message("execute_reply", reply, {}, [], reply=True))
            collector.idle.set()  # `_complete` asks for all of the text

    def _complete(self) -> None:
        """Also show again, in order, what of the text came by neither way in time."""
        super()._complete()
        pending = {}
        for rank, collector in self._collectors.items():
            if collector.death is None and rank in self._sent:
                with suppress(NBDistError):  # it has died since; recovery reports it
                    pending[rank] = self._ask(rank, whole=True)
        wait(pending.values(), _FETCH_S)
        for rank, future in pending.items():
            if not future.done() or future.exception() is not None:
                continue  # the same, or it is late: what came in time stays shown
            answer, missed = future.result(), self._missed[rank]
            if answer["known"] and not missed.has_all(answer["sent"]):
                self._live.outputs[rank] = RankOutput()
                missed.note(answer["sent"])
                for of, kind, content in answer["sent"]:
                    self._collectors[rank].on_message(Message(kind, content, {}, [], False, of))
