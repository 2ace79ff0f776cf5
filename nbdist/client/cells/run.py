"""Run one cell on the ranks: send it, show what they say, wait for all, settle faults.

Threads: everything here runs on the kernel's main thread, which waits for news from the IO
thread and wakes at least every 100 ms, so that an interrupt and a timeout are seen.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from nbdist.client.cells import outcome as outcomes
from nbdist.client.cells.interrupts import Interrupts
from nbdist.client.cells.listener import RankListener
from nbdist.client.cells.request import CellAttempt
from nbdist.client.cluster.cluster import Cluster
from nbdist.client.cluster.requests import RankDiedError
from nbdist.client.faults import rank_errors
from nbdist.client.faults.advice import Advice, AdviceKind
from nbdist.client.faults.failures import Failure, Group, missing_name, place_of
from nbdist.client.faults.fault_handler import FaultHandler
from nbdist.client.faults.leaving import Leaving
from nbdist.client.faults.repair_report import Repaired
from nbdist.client.faults.stderr_tail import StderrReader
from nbdist.client.metrics.checks.cell_checks import CellChecks
from nbdist.client.metrics.telemetry import Telemetry
from nbdist.client.output.live_text import LiveText
from nbdist.client.output.result import CellResult
from nbdist.client.output.slots import Slots
from nbdist.shared import origins, side, wire
from nbdist.shared.errors import CheckError, ClusterError, Interrupted
from nbdist.shared.processes.ended import Ended, EndKind

log = logging.getLogger(__name__)

ENDED_BEFORE: Final = Ended(EndKind.UNSEEN, detail="it had ended before the cell was sent")
_FETCH_TIMEOUT_S = 10.0
_IDLE_TIMEOUT_S = 2.0  # the last output follows the reply on another socket


@dataclass(slots=True)
class Outcome:
    """How a cell ended, before anything is raised or shown.

    `error` is what to raise: a RankError, a ClusterError, a KeyboardInterrupt, or None.
    """

    collectors: dict[int, RankListener]
    text: LiveText
    error: BaseException | None = None
    repaired: Repaired = field(default_factory=Repaired)

    @property
    def word(self) -> Literal["finished", "failed", "interrupted"]:
        """The outcome as board and tracker name it."""
        if self.error is None:
            return "finished"
        return "interrupted" if isinstance(self.error, KeyboardInterrupt) else "failed"

    def result(self) -> CellResult:
        """Return what the ranks gave."""
        outputs = self.text.outputs
        return CellResult(
            {rank: outcomes.result(c, outputs[rank]) for rank, c in self.collectors.items()}
        )


class CellRun:
    """One cell, from sending it to its outcome."""

    def __init__(
        self,
        cluster: Cluster,
        attempt: CellAttempt,
        slots: Slots,
        telemetry: Telemetry,
        on_tick: Callable[[], None],
        interrupts: Interrupts,
        checks: CellChecks,
    ) -> None:
        """Prepare; nothing is sent yet.

        Args:
            cluster: A running cluster.
            attempt: What to run.
            slots: Where live text is shown.
            telemetry: Gets the records.
            on_tick: Called on the main thread a few times a second while ranks run.
            interrupts: Counts what the person interrupts; entered by the caller.
            checks: Hears the records, too; what it finds may end the cell.
        """
        self._cluster = cluster
        self._interrupts = interrupts
        self._checks = checks
        self._is_mistaken = False  # and was interrupted for that
        self._attempt = attempt
        self._request = request = attempt.request
        self._on_tick = on_tick
        self._telemetry = telemetry
        self._news = threading.Event()
        self._slots = slots
        self._live = LiveText(slots, request.ranks)
        self._timed_out: str | None = None  # what the ranks did when the time ran out
        self._noted: set[int] = set()  # ranks whose failure is in the log of events
        self._sent: dict[int, str] = {}  # the id of each rank's message
        self._ran_before_s = 0.0
        self._ranks = dict(cluster.ranks)  # as they are before any recovery
        self._faults = FaultHandler(cluster, self._live, self._sent, request.ran)
        self._leaving = Leaving(cluster, self._live, request.ran)
        self._collectors = {
            rank: RankListener(rank, self._live, telemetry.receive, self._on_news)
            for rank in request.ranks
        }

    def run(self) -> Outcome:
        """Run the cell and return how it ended; never raises for what ranks did."""
        began = time.monotonic()
        start, events = self._attempt.start, self._cluster.events
        events.note("cell begun", number=start.number, ranks=list(start.ranks))
        cell = {origins.cell_file_name(self._request.code): start.prompt}
        self._last_words = StderrReader(self._cluster.logs, self._request.ranks, cell)
        stop_listening = self._cluster.on_death(self._on_death)
        outcome = Outcome(self._collectors, self._live)
        try:
            self._begin(start)
            self._wait(began - self._ran_before_s)
            self._complete()
            self._checks.end()
            outcome.repaired = self._recover()
            outcome.error = self._leaving.error() or self._judge(outcome.repaired)
        except ClusterError as error:
            outcome.error = error
        finally:
            stop_listening()
            for message_id in self._sent.values():
                self._cluster.requests.forget(message_id)
            self._live.close()
        took_s = round(time.monotonic() - began, 3)
        steps = {rank: c.summary.steps for rank, c in self._collectors.items()}
        events.note(
            "cell ended",
            outcome=outcome.word,
            number=start.number,
            seconds=took_s,
            steps=steps,
        )
        return outcome

    def _begin(self, start: wire.CellStart) -> None:
        if self._cluster.memory is None:
            for rank, collector in self._collectors.items():
                self._send(rank, collector, start)
            return
        # The keeper knows of a cell before any rank does: this kernel may end at any moment.
        outbox: list[Callable[[], None]] = []
        for rank, collector in self._collectors.items():
            self._send(rank, collector, start, outbox)
        self._cluster.memory.cell_began(self._attempt.memory() | {"messages": self._sent})
        self._cluster.requests.release(outbox)

    def _send(
        self,
        rank: int,
        collector: RankListener,
        start: wire.CellStart,
        outbox: list[Callable[[], None]] | None = None,
    ) -> None:
        try:
            self._sent[rank] = self._cluster.requests.execute(
                rank, self._request.code, start, collector.on_message, outbox
            )
        except RankDiedError:
            collector.died(ENDED_BEFORE)

    def _on_death(self, rank: int, ended: Ended) -> None:
        collector = self._collectors.get(rank)
        if collector is not None:
            collector.died(ended)

    def _on_news(self) -> None:
        """Wake the loop where it has something to do now. On the IO thread or the launcher's.

        It goes through all ranks: called for each reply, that grew with the square of their number.
        """
        if outcomes.is_news(self._collectors.values()):
            self._news.set()

    def _running(self) -> list[int]:
        return [rank for rank, c in self._collectors.items() if not c.settled]

    def _wait(self, began: float) -> None:
        """Wait until every rank has replied or died."""
        passed_on = 0
        while running := self._running():
            if not self._cluster.reachable:
                raise self._cluster.broken_error()
            self._note_failures()
            if self._interrupts.count > passed_on:
                passed_on = self._interrupts.count
                self._faults.interrupt(running)
            for rank in self._interrupts.ranks.intersection(running):
                self._faults.interrupt_alone(rank)
            self._look(running)
            gone = outcomes.gone(self._cluster.ranks, self._collectors, self._request.ran)
            heard_at = {rank: self._collectors[rank].heard_at for rank in running}
            self._faults.attend(running, gone, heard_at)
            self._on_tick()
            self._leaving.attend(running, self._faults)
            if not self._faults.interrupted and self._checks.mistake is not None:
                self._is_mistaken = True
                self._faults.interrupt(running)
            limit_s = self._request.timeout_s or float("inf")
            if not self._faults.interrupted and time.monotonic() - began > limit_s:
                self._timed_out = self._faults.what_they_do(running, gone)
                self._faults.interrupt(running)
            self._news.wait(self._faults.next_due())
            self._news.clear()
        self._faults.settled()
        self._note_failures()

    def _look(self, running: list[int]) -> None:
        """Check what no message reports; nothing here."""

    def _note_failures(self) -> None:
        """Write down what has failed since the last call: the error's class and line only."""
        for rank, collector in self._collectors.items():
            if collector.failure is not None and rank not in self._noted:
                self._noted.add(rank)
                failure = outcomes.failure(rank, collector.failure)
                self._cluster.events.note(
                    "rank failed", failure.ename, rank=rank, place=place_of(failure)
                )

    def _complete(self) -> None:
        """Wait for the last output, and ask for records that the push has lost."""
        deadline = time.monotonic() + _IDLE_TIMEOUT_S
        for collector in self._collectors.values():
            collector.idle.wait(max(0.0, deadline - time.monotonic()))
        living = {r: c for r, c in self._collectors.items() if c.death is None}
        bounds = {r: (c.summary.first_seq, c.summary.next_seq) for r, c in living.items()}
        deadline = time.monotonic() + _FETCH_TIMEOUT_S
        for rank, ranges in self._telemetry.gaps(bounds).items():
            for first, after in ranges:
                self._fetch_records(rank, first, after, deadline)

    def _fetch_records(
        self, rank: int, first: int, after: int, deadline: float, *, busy: bool = False
    ) -> None:
        try:
            request = self._cluster.requests.ask(
                rank, "records.resend", busy=busy, first=first, next=after
            )
            for batch in request.result(max(0.1, deadline - time.monotonic())):
                self._telemetry.receive(wire.Batch.from_wire(batch))
        except Exception:
            # The result of the cell matters more than a gap in its plot.
            log.exception("Records %s to %s of rank %s are lost", first, after, rank)

    def _recover(self) -> Repaired:
        is_destroyed = any(not c.summary.in_group for c in self._collectors.values())
        if not self._has_failed() and not self._faults.cut and not is_destroyed:
            return Repaired()
        return self._faults.finish(
            {rank: c.summary for rank, c in self._collectors.items() if c.replied},
            reported=[rank for rank, c in self._collectors.items() if c.death is not None],
            last_words=self._last_words.of,
        )

    def _judge(self, repaired: Repaired) -> BaseException | None:
        """Return what to raise: for the time limit, an interrupt, or what failed on the ranks."""
        failures = outcomes.failures(self._collectors, self._last_words.of)
        deaths = outcomes.deaths(self._collectors, self._last_words.of)
        beside = rank_errors.beside_interrupt(
            failures, deaths, killed=self._faults.killed, at=self._faults.interrupted_at
        )
        loops = outcomes.in_loops(self._collectors)
        loops = loops and repaired.is_whole and not self._cluster.broken
        if self._is_mistaken and not self._interrupts.count:
            return self._mistaken(beside, repaired, in_loops=loops)
        if self._timed_out is not None:
            return self._out_of_time(self._timed_out, beside, repaired, in_loops=loops)
        if self._interrupts.is_to_stop:
            return Interrupted(self._request.ran.stopped)
        if self._faults.interrupted or self._interrupts.count:
            return self._interrupted(beside, repaired, in_loops=loops)
        deadlock = self._faults.deadlock
        if not self._has_failed() and deadlock is None:
            return self._mistaken((), repaired, in_loops=False)
        return rank_errors.rank_error(
            failures,
            asked=list(self._collectors),
            deaths=deaths,
            where=outcomes.places(self._ranks),
            notes=repaired.lines,
            because=deadlock.text if deadlock else "",
            do=self._advice(repaired),
            otherwise=self._advice_to_retry(repaired) or self._advice_on_name(failures),
            in_loops=loops,
            ran=self._request.ran,
            replaced=repaired.replaced,
        )

    def _has_failed(self) -> bool:
        return any(c.failure or c.death for c in self._collectors.values())

    def _out_of_time(
        self,
        doing: str,
        beside: Sequence[Group],
        repaired: Repaired,
        *,
        in_loops: bool,
    ) -> ClusterError:
        """Return the error of a cell that ran too long; `doing` is what its ranks did then."""
        ran = self._request.ran
        own = rank_errors.summaries(beside, outcomes.places(self._ranks))
        return ClusterError(
            f"{ran.title} ran longer than its {ran.limit} of {self._request.timeout_s:g} s, "
            "and was interrupted.",
            why=" ".join(
                [
                    f"{doing}.",
                    *(f"{line.strip()}." for line in own),
                    *(repaired.lines if repaired.replaced else ()),
                ]
            ),
            do=ran.out_of_time + (f" {ran.loops()}" if in_loops else ""),
        )

    def _mistaken(
        self, beside: Sequence[Group], repaired: Repaired, *, in_loops: bool
    ) -> CheckError | None:
        """Return the error of a cell in which a rule that is set to raise has found something."""
        mistake = self._checks.mistake
        if mistake is None:
            return None
        ran = self._request.ran
        own = rank_errors.summaries(beside, outcomes.places(self._ranks))
        ended = "was interrupted" if self._is_mistaken else "had come to its end"
        kept = () if repaired.replaced else ("All ranks kept their variables.",)
        return CheckError(
            mistake.sentence,
            why=" ".join(
                [
                    f"the rule {mistake.rule} is set to raise, and {ran.name} {ended}.",
                    *(f"{line.strip()}." for line in own),
                    *(repaired.lines or kept),
                ]
            ),
            do=f"change that, and {ran.again()}; %%distributed --ignore {mistake.rule} lets it "
            f"pass in one cell." + (f" {ran.loops()}" if in_loops else ""),
            rule=mistake.rule,
        )

    def _interrupted(
        self, beside: Sequence[Group], repaired: Repaired, *, in_loops: bool
    ) -> Interrupted:
        """Return the error of a cell that the person has interrupted."""
        loops = [self._request.ran.loops(unchanged=True)] if in_loops else []
        return Interrupted(
            rank_errors.interrupted(
                beside,
                asked=len(self._collectors),
                killed=self._faults.killed,
                where=outcomes.places(self._ranks),
                notes=[*repaired.lines, *loops],
            )
        )

    def _advice(self, repaired: Repaired) -> Advice | None:
        if self._cluster.broken:
            return Advice(AdviceKind.RESTART, self._cluster.broken_error().do)
        ran = self._request.ran
        if (repaired.replaced or repaired.has_fewer) and not repaired.is_whole:
            return ran.make_again(and_loader=True)
        if repaired.is_refused:
            return ran.restore(saves_itself=self._request.every > 0)
        return ran.retry_on_fewer if repaired.has_fewer else None

    def _advice_on_name(self, failures: Sequence[Failure]) -> Advice | None:
        """Return what to do about a name that ranks lack and the notebook has."""
        name = missing_name(failures)
        text = side.notebook.advise_on(name) if name else ""
        return Advice(AdviceKind.FIX, text) if text else None

    def _advice_to_retry(self, repaired: Repaired) -> Advice | None:
        """Return what to do when nothing is wrong with the cell itself."""
        ran = self._request.ran
        if repaired.replaced or self._faults.interrupted_alone:
            if outcomes.in_loops(self._collectors):
                return ran.retry_loops
            return ran.retry if repaired.replaced else ran.run_again
        return self._faults.deadlock.do if self._faults.deadlock else None
