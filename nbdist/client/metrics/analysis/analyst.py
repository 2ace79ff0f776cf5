"""Everything that is worked out of a cell's records, on one thread: `nbdist-analysis`'s.

A step is explained when all ranks have reported its collectives. One that a rank has passed over is
left out: ranks that have more to tell leave out more steps. A rank that tells nothing at all is
waited for `LATE_S`, and not again before it tells something: some ranks may train nothing. What it
then tells of a step that was explained without it is left out.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from nbdist.client.metrics.analysis.match import Meetings, arrivals, match
from nbdist.client.metrics.analysis.parts import StepParts
from nbdist.client.metrics.analysis.rows import CallRows, FamilyIndex, Waits, decode
from nbdist.client.metrics.analysis.steps import BlockedTime, split
from nbdist.client.metrics.analysis.stragglers import StragglerReport
from nbdist.client.metrics.analysis.table import CollectiveTable, MatchedCollectives, met
from nbdist.client.metrics.analysis.timeline import STEPS, SampledSteps, line_of, time_line
from nbdist.client.metrics.analysis.values import (
    LEFT_OUT,
    Analysis,
    CollectiveRow,
    ExplainedStep,
    RankStep,
    TimeLine,
)
from nbdist.shared.collectives import waits_for_all
from nbdist.shared.packed import CALL, Calls
from nbdist.shared.wire import Record, is_measured

LATE_S = 3.0
MOST_WAITING = 400_000  # numbers recorded of steps that are not explained yet
MOST_KEPT = 60_000  # calls of single steps whose time line may be asked for; 100 bytes each
MOST_LENGTHS = 4096  # of steps that are not explained yet
_MS = 1e-6  # in a nanosecond


class Clock(Protocol):
    """The ranks' clocks, as far as they are known."""

    @property
    def error_ns(self) -> int:
        """How far apart two ranks' moments of the same instant can be at most."""

    def offset_ns(self, rank: int, moment_ns: int) -> int | None:
        """Return what to add to a rank's moment for the common clock; None when not known."""


class Analyst:
    """One cell's steps and collectives."""

    def __init__(
        self,
        ranks: Sequence[int],
        clock: Clock,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Know nothing yet of these ranks; `now_s` measures who is late."""
        self._ranks = tuple(ranks)
        self._clock = clock
        self._now_s = now_s
        self._parts = StepParts()
        self._later_ranks: tuple[RankStep, ...] = ()  # once the cell is over
        self._later_table: tuple[CollectiveRow, ...] = ()
        self._book = FamilyIndex()
        self._table = CollectiveTable()
        self._line: TimeLine | None = None
        self._kept: tuple[SampledSteps, ...] = ()  # replaced as a whole: `line_of` reads it
        self._verdicts = StragglerReport()
        self._left_out = 0
        self._explained_until = 0
        self._told: dict[int, dict[int, Calls]] = {}  # steps to be explained, by rank
        self._since: dict[int, float] = {}
        self._newest: dict[int, int] = {}  # rank to the last step it has reported
        self._silent: set[int] = set()
        self._size = 0
        # Of the first rank's last steps: how long they were, and when they were over.
        self._lengths_ns: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        # Of the steps explained last: calls may end, and the line is drawn, later.
        self._recent: list[int] = []
        self._rows: list[CallRows] = []
        self._waits: list[Waits] = []

    def take(self, records: Sequence[Record], *, is_last: bool) -> list[ExplainedStep]:
        """Take records of any ranks; return the steps that are explained now, in order.

        Args:
            records: Each rank's in the order in which it made them, as far as they have come.
            is_last: No more will come: do not wait for a rank's.
        """
        self._verdicts.take(records, self._now_s(), is_last=is_last)
        for record in records:
            if record.kind == "step":
                if not is_measured(record.values):
                    continue
                self._parts.add_step(record.rank, record.step, record.values)
                if record.rank == self._ranks[0]:
                    self._lengths_ns[record.step] = round(record.values["step_s"] * 1e9)
                    if len(self._lengths_ns) > MOST_LENGTHS:  # nothing is explained: one rank, say
                        del self._lengths_ns[next(iter(self._lengths_ns))]
            elif record.detail is not None:
                self._hear(record, record.detail)
        ready = self._ready(is_last)
        explained = self._explain(ready) if ready else []
        if is_last:
            self._later_ranks = self._parts.means(LEFT_OUT)
            self._later_table = self._table.behind(LEFT_OUT, self._book.families)
        return explained

    def analysis(self) -> Analysis:
        """Return all that is known."""
        return Analysis(
            ranks=self._parts.means(),
            verdicts=self._verdicts.newest,
            links=self._verdicts.rates,
            own_ms=self._verdicts.own_ms,
            table=self._table.rows,
            line=self._line,
            clock_error_ms=self._clock.error_ns * _MS,
            explained_until=self._explained_until,
            left_out=self._left_out,
            later_ranks=self._later_ranks,
            later_table=self._later_table,
        )

    def line_of(self, step: int) -> TimeLine | None:
        """Return the time line of one step; None of one that was not recorded, or long ago.

        Any thread.
        """
        for sampled in reversed(self._kept):
            if step in sampled.steps:
                return line_of(sampled, self._ranks, self._table.row_of, step)
        return None

    def _hear(self, record: Record, calls: Calls) -> None:
        rank, step = record.rank, record.step
        self._book.learn(rank, dict(calls.new))
        self._left_out += calls.skipped
        self._silent.discard(rank)
        if step <= self._explained_until or rank not in self._ranks:
            self._left_out += len(calls.calls) // len(CALL)
            return
        self._newest[rank] = max(step, self._newest.get(rank, 0))
        if rank == self._ranks[0]:
            offset_ns = self._clock.offset_ns(rank, calls.end_ns)
            if offset_ns is not None:
                self._ends[step] = calls.end_ns + offset_ns
        self._told.setdefault(step, {})[rank] = calls
        self._since.setdefault(step, self._now_s())
        self._size += len(calls.calls) + len(calls.waits)

    def _ready(self, is_last: bool) -> list[int]:
        """Return the steps to be explained now, in order; who keeps them waiting is silent."""
        ready = []
        now_s = self._now_s()
        for step in sorted(self._told):
            missing = set(self._ranks) - self._silent - set(self._told[step])
            if any(self._newest.get(rank, 0) > step for rank in missing):
                dropped = self._drop(step)
                self._ends.pop(step, None)  # not drawn as one without collectives
                self._left_out += sum(len(calls.calls) // len(CALL) for calls in dropped.values())
                continue
            is_late = now_s - self._since[step] > LATE_S or self._size > MOST_WAITING
            if missing and not is_last:
                if not is_late:
                    break
                self._silent |= missing
            ready.append(step)
        return ready

    def _explain(self, steps: list[int]) -> list[ExplainedStep]:
        fresh_rows, fresh_waits = self._decode(steps)
        self._rows, self._waits = [*self._rows, *fresh_rows], [*self._waits, *fresh_waits]
        rows = CallRows.concatenate(self._rows)
        waits = Waits.concatenate(fresh_waits)
        families = self._book.families
        meetings = match(rows, self._book.sizes)
        is_symmetric = np.array([waits_for_all(f.kind) for f in families], bool)
        n = max(self._ranks) + 1
        pair = np.searchsorted(steps, waits.step) * n + waits.rank
        divided = split(
            meetings.rows, arrivals(meetings, is_symmetric), waits, pair, len(steps) * n, n
        )
        every = met(meetings, families)
        is_new = every.step >= steps[0]
        news = every.at(is_new)
        self._table.add(steps, news, families)
        explained = self._tell(steps, divided, news, n)
        self._explained_until = steps[-1]
        self._draw(meetings, every)
        self._forget(steps)
        return explained

    def _decode(self, steps: list[int]) -> tuple[list[CallRows], list[Waits]]:
        rows, waits = [], []
        for rank in self._ranks:
            sampled = [(step, self._told[step][rank]) for step in steps if rank in self._told[step]]
            if not sampled:
                continue
            offset_ns = self._clock.offset_ns(rank, sampled[-1][1].base_ns)
            if offset_ns is None:
                self._left_out += sum(len(calls.calls) // len(CALL) for _, calls in sampled)
                continue
            calls, blocked, left_out = decode(rank, sampled, self._book, offset_ns)
            rows.append(calls)
            waits.append(blocked)
            self._left_out += left_out
        return rows, waits

    def _tell(
        self, steps: list[int], divided: BlockedTime, news: MatchedCollectives, n: int
    ) -> list[ExplainedStep]:
        whole = news.at(news.is_whole)
        order = np.lexsort((whole.skew, whole.step))
        # The last of each step is the one of greatest skew.
        greatest = dict(zip(whole.step[order].tolist(), order.tolist(), strict=True))
        explained = []
        for i, step in enumerate(steps):
            ranks = sorted(self._told[step])
            at = greatest.get(step)
            result = ExplainedStep(
                step,
                waiting_ms={r: float(divided.waiting[i * n + r]) * _MS for r in ranks},
                transfer_ms={r: float(divided.transfer[i * n + r]) * _MS for r in ranks},
                skew_ms=None if at is None else float(whole.skew[at]) * _MS,
                last=None if at is None else int(whole.last[at]),
            )
            explained.append(result)
            waited = {r: divided.waiting_for[i * n + r] for r in ranks}
            by_peer = {
                r: {int(peer): float(of[peer]) * _MS for peer in np.flatnonzero(of)}
                for r, of in waited.items()
            }
            self._parts.add_explained(result, by_peer)
        return explained

    def _draw(self, meetings: Meetings, every: MatchedCollectives) -> None:
        steps = {
            step: (end_ns - self._lengths_ns[step], end_ns)
            for step, end_ns in self._ends.items()
            if step in self._lengths_ns and step <= self._explained_until
        }
        sampled = SampledSteps(
            meetings, every.family, Waits.concatenate(self._waits), steps, self._book.units
        )
        self._line = time_line(sampled, self._ranks, self._table.row_of) or self._line
        kept, calls = [sampled], len(meetings.rows.step)
        for older in reversed(self._kept):
            calls += len(older.meetings.rows.step)
            if calls > MOST_KEPT:
                break
            kept.insert(0, older)
        self._kept = tuple(kept)

    def _forget(self, steps: list[int]) -> None:
        for step in steps:
            self._drop(step)
        self._recent = [*self._recent, *steps][-STEPS:]
        first = self._recent[0]
        rows, waits = CallRows.concatenate(self._rows), Waits.concatenate(self._waits)
        self._rows, self._waits = [rows.at(rows.step >= first)], [waits.at(waits.step >= first)]
        self._lengths_ns = {step: ns for step, ns in self._lengths_ns.items() if step >= first}
        self._ends = {step: ns for step, ns in self._ends.items() if step >= first}

    def _drop(self, step: int) -> dict[int, Calls]:
        """Take a step from those that wait to be explained."""
        dropped = self._told.pop(step)
        self._since.pop(step)
        self._size -= sum(len(calls.calls) + len(calls.waits) for calls in dropped.values())
        return dropped
