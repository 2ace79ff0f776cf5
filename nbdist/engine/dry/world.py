"""All ranks of a dry cell: a forked process each, which ask each other through this one.

First all decide as if no condition on a number held. Then for each place that decides by one, its
other outcome is run: on all ranks where all have the same number, else on those alone that share
the first rank's. What goes wrong then, and does not before, is a branch that ranks take apart.
"""

import gc
import os
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from nbdist.engine.dry.cell import AskedCell, run, warm
from nbdist.engine.dry.kinds import kinds_of
from nbdist.engine.dry.rank_log import whole
from nbdist.study.dry import (
    DryRun,
    Finding,
    Trace,
    before_cuts,
    cut_apart,
    judge,
    over_memory,
    unknown_ends,
)
from nbdist.study.dry_kinds import of_kind, told_apart

DEADLINE_S = 120.0
MOST_BRANCHES = 8
_MOST_TRIES = 4  # to find outcomes with which no rank raises

Answers = Mapping[str, str]
Box = dict[Any, dict[int, Any]]


def check(asked: AskedCell, ranks: Sequence[int]) -> DryRun:
    """Return what ranks would do; those of the world that are not named do not run the cell."""
    warm()
    return _Check(asked, ranks).answer()


class _Check:
    def __init__(self, asked: AskedCell, ranks: Sequence[int]) -> None:
        self._asked, self._ranks = asked, tuple(ranks)
        self._until = time.monotonic() + DEADLINE_S
        self._notes: dict[str, None] = {}
        codes = (code for _, code in (*asked.before, (0, asked.code)))
        self._kinds = kinds_of(codes, ranks, asked.world_size, asked.ranks_on_host)

    def answer(self) -> DryRun:
        answers, traces = self._without_errors()
        world = self._with_absent(traces)
        findings: list[Finding] = []
        while len(traces) == len(self._ranks) and (apart := cut_apart(world)):
            if findings := judge({rank: before_cuts(one, apart) for rank, one in world.items()}):
                break
            answers |= {whole(place): "yes" for place in apart}
            self._notes.clear()
            traces = self._run(self._ranks, answers)
            world = self._with_absent(traces)
        if len(traces) < len(self._ranks):
            text = f"{len(traces)} of {len(self._ranks)} ranks ran in {DEADLINE_S:.0f} s: "
            text += "nothing is proven; ask for fewer with -n."
            return DryRun(self._asked.world_size, unknown=(text,))
        findings = [*(findings or judge(world)), *over_memory(traces, self._asked.memory)]
        doubts = unknown_ends(traces)
        if not findings:
            findings, unclear = self._other_ways(answers, world)
            doubts += unclear
        peak = max((one.peak for one in traces.values()), default=0)
        ended = {
            rank: one.collectives for rank, one in world.items() if one.end in ("end", "absent")
        }
        return DryRun(
            self._asked.world_size,
            tuple(findings),
            tuple(doubts),
            ended,
            peak,
            tuple(f"{note[:1].upper()}{note[1:]}." for note in self._notes),
        )

    def _with_absent(self, traces: dict[int, Trace]) -> dict[int, Trace]:
        absent = set(range(self._asked.world_size)) - set(self._ranks)
        return traces | {rank: Trace(end="absent") for rank in absent}

    def _without_errors(self) -> tuple[dict[str, str], dict[int, Trace]]:
        """Return outcomes of branches with which ranks come as far as they can."""
        answers: dict[str, str] = {}
        first = traces = self._run(self._ranks, answers)
        for _ in range(_MOST_TRIES):
            wrong = [one for one in traces.values() if one.end == "error" and one.branches]
            places = [b.place for one in wrong for b in reversed(one.branches)]
            at = next((place for place in places if place not in answers), None)
            if at is None:
                break
            answers[at] = "yes"
            traces = self._run(self._ranks, answers)
        if any(one.end == "error" for one in traces.values()):
            return {}, first
        return answers, traces

    def _other_ways(
        self, answers: Answers, world: dict[int, Trace]
    ) -> tuple[list[Finding], list[str]]:
        """Return what goes wrong where branches are decided otherwise, and what was not tried."""
        first: dict[str, dict[int, int]] = {}  # the value at a place, by rank
        for rank, one in world.items():
            for branch in one.branches:
                first.setdefault(branch.place, {}).setdefault(rank, branch.value)
        found: list[Finding] = []
        doubts: list[str] = []
        if first:
            text = (
                f"decisions by numbers that are not known: {', '.join(first)}; calls are counted "
            )
            self._notes[f"{text}as if they were all no, or raised nothing"] = None
        for number, (place, values) in enumerate(first.items()):
            if number >= MOST_BRANCHES or time.monotonic() > self._until:
                doubts.append(f"Not known: the other outcome of the decision at {place}.")
                continue
            common = next(iter(values.values()))
            others = [rank for rank, value in values.items() if value == common]
            is_equal = len(others) == len(values)
            other = {**answers, place: "no" if answers.get(place) == "yes" else "first"}
            made = self._run(others, other, None if is_equal else self._box)
            tried = {**world, **made}
            apart = cut_apart(tried)
            wrong = judge({rank: before_cuts(one, apart) for rank, one in tried.items()})
            if any(one.end == "error" for one in made.values()):
                continue  # a check that raises: on a real rank its peers are told
            if len(made) < len(others) or (apart and not wrong):
                doubts.append(f"Not known: the other outcome of the decision at {place}.")
            elif wrong:
                how = f"where the decision at {place} is the other"
                if not is_equal:
                    how = f"{place} decides by each rank's own number, and ranks that decide "
                    how += "otherwise make other calls"
                places = (place, *wrong[0].places)
                found.append(Finding("branch", places, f"{how}: {wrong[0].text}"))
        return found, doubts

    def _run(
        self, ranks: Sequence[int], answers: Answers, known: Box | None = None
    ) -> dict[int, Trace]:
        """Run the cell on ranks; what others have brought before is known."""
        kinds = [own for kind in self._kinds if (own := [one for one in kind if one in ranks])]
        few = {kind[at] for kind in kinds for at in (0, len(kind) // 2, -1)}
        traces = None
        if few and 2 * len(few) <= len(ranks):
            others = {
                key: {r: own for r, own in of.items() if r not in ranks}
                for key, of in (known or {}).items()
            }
            crew = _Crew(self._asked, answers, others, kinds)
            traces = self._by_kinds(crew, kinds, few, ranks)
            if traces is None:
                self._kinds = []  # where they differ once, all are run from then on
        if traces is None:
            crew = _Crew(self._asked, answers, known)
            traces = crew.run(ranks, self._until)
        if known is None:
            self._box = crew.box
        self._notes |= dict.fromkeys(crew.notes)
        return traces

    def _by_kinds(
        self, crew: "_Crew", kinds: Sequence[Sequence[int]], few: set[int], ranks: Sequence[int]
    ) -> dict[int, Trace] | None:
        """Run few ranks of each kind; return what all do, None where they differ."""
        traces: dict[int, Trace] = {}
        while new := sorted(few - traces.keys()):
            traces |= crew.run(new, self._until)
            if crew.is_unclear or len(traces) < len(few):
                return None
            few = few | told_apart(traces, self._asked.world_size) & {*ranks}
            if 2 * len(few) > len(ranks):
                return None
        found: dict[int, Trace] = {}
        for kind in kinds:
            run = {rank: traces[rank] for rank in kind if rank in traces}
            if (same := of_kind(run, kind, self._asked.world_size)) is None:
                return None
            found |= same
        return dict(sorted(found.items()))


class _Crew:
    """Processes of ranks, of which as many compute at once as there are cores.

    Those of a kind that are not run bring what one that runs does.
    """

    def __init__(
        self,
        asked: AskedCell,
        answers: Answers,
        known: Box | None,
        kinds: Sequence[Sequence[int]] = (),
    ) -> None:
        self._asked, self._answers = asked, dict(answers)
        self._kind = {rank: number for number, kind in enumerate(kinds) for rank in kind}
        self._run: set[int] = set()
        self.notes: list[str] = []
        self.is_unclear = False  # what never came may come from a rank that is not run
        self.box: Box = {key: dict(of) for key, of in (known or {}).items()}
        self._asking: dict[Connection, tuple[Any, list[int]]] = {}
        self._of: dict[Connection, int] = {}
        self._pids: dict[int, int] = {}

    def run(self, ranks: Sequence[int], until: float) -> dict[int, Trace]:
        """Return what each rank did; those missing ran out of time."""
        gc.collect()
        gc.freeze()  # forks then share what was imported
        left = list(reversed(ranks))
        self._run |= {*ranks}
        traces: dict[int, Trace] = {}
        at_once = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
        while (left or self._of) and time.monotonic() < until:
            while left and len(self._of) - len(self._asking) < at_once:
                self._fork(left.pop())
            if self._of and len(self._asking) == len(self._of):
                self._tell_all_that_nothing_comes()
            for one in wait([*self._of], timeout=max(0.0, until - time.monotonic())):
                assert isinstance(one, Connection)
                self._hear(one, traces)
        for pid in self._pids.values():
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        return dict(sorted(traces.items()))

    def _fork(self, rank: int) -> None:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _be(self._asked, rank, self._answers, theirs)
        theirs.close()
        self._of[ours], self._pids[rank] = rank, pid

    def _hear(self, one: Connection, traces: dict[int, Trace]) -> None:
        rank = self._of[one]
        try:
            said, *rest = one.recv()
        except EOFError:
            said, rest = "end", [Trace(end="unknown", place="its beginning", said="it crashed"), []]
        if said == "end":
            traces[rank] = rest[0]
            self.notes += rest[1]
            del self._of[one]
            one.close()
            os.waitpid(self._pids.pop(rank), 0)
            return
        key, members, own, waits = rest
        box = self.box.setdefault(key, {})
        box[rank] = own
        for other in members if rank in self._kind else ():
            if other not in self._run and self._kind.get(other) == self._kind[rank]:
                box.setdefault(other, own)
        if waits:
            self._asking[one] = key, members
        self._answer(key)

    def _answer(self, key: Any) -> None:
        for one, (asked, members) in [*self._asking.items()]:
            if asked == key and self.box[key].keys() >= {*members}:
                del self._asking[one]
                one.send(self.box[key])

    def _tell_all_that_nothing_comes(self) -> None:
        for one, (key, members) in [*self._asking.items()]:
            run = {self._kind.get(rank) for rank in members if rank in self._run}
            missing = {*members} - self.box[key].keys() - self._run
            self.is_unclear |= any(self._kind.get(rank, -1) not in run for rank in missing)
            del self._asking[one]
            one.send(None)


def _be(asked: AskedCell, rank: int, answers: dict[str, str], line: Connection) -> None:
    """Be a rank, and end."""

    def ask(key: Any, members: list[int], _: int, own: Any, waits: bool) -> dict[int, Any] | None:
        line.send(("ask", key, members, own, waits))
        return line.recv() if waits else None

    try:
        line.send(("end", *run(asked, rank, answers, ask)))
    finally:
        os._exit(0)
