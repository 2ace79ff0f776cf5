"""Run a cell as it was asked for: after a repair where one is due, and again where that is wanted.

A cell that failed is remembered with all it was asked with, so that `%dist retry` can run it again.
A cell that runs again says so to the ranks, whose loaders continue where they were, and continues
the MLflow run of the failed attempt.

Main thread only.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbdist.client.cells.attached import AttachedCell
from nbdist.client.cells.cell_context import CellContext
from nbdist.client.cells.interrupts import Interrupts
from nbdist.client.cells.outcome import in_loops
from nbdist.client.cells.request import CellAttempt, CellRequest, remembered
from nbdist.client.cells.run import CellRun, Outcome
from nbdist.client.cells.shown_cell import ShownCell
from nbdist.client.cluster.cluster import Cluster
from nbdist.client.faults.advice import A_CELL, WhatRan
from nbdist.client.faults.failures import should_go_on, uses_what_is_lost
from nbdist.client.faults.fewer_ranks import go_on_without
from nbdist.client.faults.recovery import repair
from nbdist.client.faults.repair_report import Repaired
from nbdist.client.metrics.profile.chosen import ChosenSteps
from nbdist.client.metrics.profile.collectives import ProfiledCollectives
from nbdist.client.metrics.profile.gather import Profiled, folder_of, gather
from nbdist.client.output.result import CellResult
from nbdist.client.output.slots import kernel_shell
from nbdist.shared.errors import ClusterError, Interrupted, NBDistError, RankError, UsageError
from nbdist.shared.options import is_whole
from nbdist.shared.text import begin_with_ranks, counted, name_ranks
from nbdist.shared.wire import ProfileSteps, Repeat


@dataclass(frozen=True, slots=True)
class _Attempt:
    """An attempt that has ended: cell `number`, and `run`, the MLflow run it had begun.

    `world_size` is the number of ranks that there were.
    """

    number: int
    outcome: Outcome
    shown: ShownCell
    run: str | None
    world_size: int

    @property
    def made_steps(self) -> bool:
        """Whether anything was trained or logged in it."""
        return self.shown.telemetry.first_record.is_set()


class CellAttempts:
    """The cells of one session, one after the other."""

    def __init__(self, cluster: Cluster, showing: CellContext) -> None:
        """Begin with no cell run."""
        self.last: CellResult | None = None
        self.profile: Profiled | None = None
        self.shown: ShownCell | None = None  # how the last cell is shown
        self._cluster = cluster
        self._showing = showing
        self._count = 0
        self._profiled_cells: Counter[int] = Counter()  # by their prompt, which names their folders
        self._profile_folder: Path | None = None  # of the newest
        self._failed: tuple[CellRequest, _Attempt] | None = None
        # The newest of those whose loops have trained, which ranks remember: a typo in a cell that
        # looks around does not take its place.
        self._failed_loop: tuple[CellRequest, _Attempt] | None = None

    def run(self, request: CellRequest, retries: int = 0, *, go_on: bool = False) -> CellResult:
        """Run a cell; after a RankError again, `retries` times at most.

        With `go_on` it is the cell that failed last in its loops, fixed.

        Raises:
            ClusterError: No cell has failed that it could continue, or a rank had died before the
                cell, and its variables are lost.
            RankError: The cell failed on a rank, in the last attempt.
            KeyboardInterrupt: The cell was interrupted; all ranks have settled.
            UsageError: `retries` is no number of times.
        """
        if not is_whole(retries):
            raise UsageError(f"A cell runs again a number of times, 0 for never, not {retries!r}.")
        if request.prompt is None:
            request = replace(request, prompt=self._prompt())  # the same in every attempt
        if not go_on:
            return self._run(request, None, retries)
        failed, before = self._failed_loop or self._last_failed()
        # Checkpoints of the cell that failed are this one's, too.
        is_changed = request.code != failed.code
        request = replace(request, asked_at=failed.asked_at, is_changed=is_changed)
        return self._run(request, before, retries)

    def call(self, name: str, ranks: tuple[int, ...], **arguments: Any) -> CellResult:
        """Have ranks run a row of `CELLS` in `engine/kernel/ipython/calls.py`, as they run a cell.

        It is no cell of the notebook's: nothing is left to retry, and `last` stays.

        Raises:
            RankError, ClusterError, KeyboardInterrupt: As `run`.
        """
        world_size = len(self._cluster.ranks)
        notice = self._replace_dead(A_CELL)
        ranks = ranks_again(ranks, world_size, tuple(self._cluster.ranks))
        request = CellRequest("", ranks, track=False, call=name, arguments=arguments)
        done = self._send(request, None, notice, follows=False)
        if done.outcome.error is not None:
            raise done.outcome.error
        return done.outcome.result()

    def begin_at(self, count: int) -> None:
        """Count on from the cells that another kernel has run."""
        self._count = count

    def replace_dead(self) -> str:
        """Replace ranks that have died since the last cell; return a notice, or an empty text.

        Raises:
            ClusterError: They could not be replaced.
        """
        died, repaired = self._repair_dead()
        return " ".join([f"{died}.", *repaired.lines]) if died else ""

    def go_on(self, memory: Mapping[str, Any]) -> CellResult:
        """Go on with a cell that another kernel has sent, to its end; see `CellAttempt.memory`.

        Raises:
            RankError, ClusterError, KeyboardInterrupt: As `run`.
        """
        attempt = remembered(memory)
        request = attempt.request
        own = {**memory, "kernels": [*memory.get("kernels", ()), memory["kernel"]]}
        run = self._showing.run_of(request.prompt or 0, own["kernels"], memory["began"])
        if attempt.start.profile is not None:
            self._profile_folder = Path(attempt.start.profile.folder).parent
        done = self._follow(attempt, None, "", follows=False, run=run, memory=own)
        if done.outcome.error is not None:
            self._has_failed(_as_changed(request, done), done, None)
            raise done.outcome.error
        assert self.last is not None, "an attempt leaves its result"
        return self.last

    def retry(self) -> CellResult:
        """Run the cell again that failed or was interrupted last.

        Raises:
            ClusterError: No cell has; else as `run`.
        """
        request, before = self._last_failed()
        if self._failed is not self._failed_loop:
            self._failed_loop = None  # ranks remember one cell
        ranks = ranks_again(
            request.ranks, before.world_size, tuple(self._cluster.ranks), request.ran
        )
        # In another cell of the notebook.
        return self._run(replace(request, above=(), ranks=ranks), before, 0, request.runs_again)

    def _last_failed(self) -> tuple[CellRequest, _Attempt]:
        if self._failed is None:
            raise ClusterError(
                "There is nothing to retry.",
                why="no cell of this session failed or was interrupted, or it has succeeded since.",
                do="run the %%distributed cell itself.",
            )
        return self._failed

    def _run(
        self, request: CellRequest, before: _Attempt | None, retries: int, notice: str = ""
    ) -> CellResult:
        world_size = len(self._cluster.ranks)
        notice = " ".join(filter(None, (notice, self._replace_dead(request.ran))))
        for attempt in range(1, retries + 2):
            # Without a host for some, there are fewer ranks than before.
            there = tuple(self._cluster.ranks)
            request = replace(
                request, ranks=ranks_again(request.ranks, world_size, there, request.ran)
            )
            world_size = len(there)
            done = self._attempt(request, before, notice, follows=attempt > 1)
            error = done.outcome.error
            if error is None:
                self._went_well(request, before)
                assert self.last is not None, "an attempt leaves its result"
                return self.last
            asked, request = request, _as_changed(request, done)
            self._has_failed(request, done, before)
            if not isinstance(error, RankError) or retries == 0:
                raise error
            earlier = before if attempt > 1 else None
            can_restore = request.every > 0
            ran = request.ran
            error.why = _why_not_again(
                done, earlier, attempt, retries, ran, can_restore=can_restore
            )
            if error.why:
                raise error
            lines = done.outcome.repaired.lines
            if self._cluster.broken:
                lines = self._with_fewer_ranks(done.outcome.repaired, error, request.ran)
            lines = (*lines, *_changed_lines(asked, request))
            notice = announcement(attempt + 1, retries + 1, error, lines)
            before = done
        raise AssertionError("the last attempt returns or raises")

    def _with_fewer_ranks(
        self, repaired: Repaired, error: RankError, ran: WhatRan
    ) -> tuple[str, ...]:
        """Continue without the ranks that cannot be replaced; returns what was done, in sentences.

        Raises:
            RankError: `error`, where that is impossible.
        """
        if not repaired.irreplaceable:
            raise error
        try:
            with Interrupts():
                return go_on_without(self._cluster, repaired.irreplaceable, ran)
        except NBDistError as failed:
            error.why = f"{ran.name} could not continue with fewer ranks: {_in_a_sentence(failed)}"
            raise error from failed

    def _has_failed(self, request: CellRequest, done: _Attempt, before: _Attempt | None) -> None:
        """Note the cell that failed, and whether it is the one whose loops can continue."""
        self._failed = request, done
        repeats = self._failed_loop is not None and before is self._failed_loop[1]
        if repeats or in_loops(done.outcome.collectors):
            self._failed_loop = self._failed

    def _went_well(self, request: CellRequest, before: _Attempt | None) -> None:
        """Forget the cell that failed, where this was it."""
        if before is not None or (self._failed and self._failed[0].code == request.code):
            self._failed = None
        if self._failed_loop and (
            before is self._failed_loop[1] or self._failed_loop[0].code == request.code
        ):
            self._failed_loop = None

    def _replace_dead(self, ran: WhatRan) -> str:
        """Do as `replace_dead`, for what is not run where what ranks held is lost."""
        died, repaired = self._repair_dead()
        if not repaired.is_whole:
            raise ClusterError(
                f"{died}, so {ran.name} was not run.",
                why=" ".join(repaired.lines),
                do=f"run the cells that create what is lost again, then {ran.run}.",
            )
        return " ".join([f"{died}.", *repaired.lines]) if died else ""

    def _repair_dead(self) -> tuple[str, Repaired]:
        """Replace dead ranks; return that they had died, or nothing, and what was done."""
        causes = {rank: str(self._cluster.ranks[rank].ended) for rank in self._cluster.dead()}
        if not causes:
            return "", Repaired()
        with Interrupts() as interrupts:
            repaired = repair(self._cluster, reported=causes)
        if self._cluster.broken:
            raise self._cluster.broken_error()
        how = ", ".join(dict.fromkeys(causes.values()))
        died = f"{begin_with_ranks(causes)} had died since the last cell ({how})"
        if interrupts.count and repaired.is_whole:
            raise Interrupted(" ".join([f"{died}.", *repaired.lines]))
        return died, repaired

    def _attempt(
        self, request: CellRequest, before: _Attempt | None, notice: str, *, follows: bool
    ) -> _Attempt:
        """Run the cell once, and once more where it has no effect as it started over.

        Args:
            request: The cell.
            before: The attempt that this one repeats.
            notice: Stays above the cell's output.
            follows: Whether the one before is shown in the same cell of the notebook.
        """
        repeat = Repeat.NO if before is None else Repeat.RETRY
        done = self._send(request, before, notice, follows=follows, repeat=repeat)
        if before is None or not should_go_on(done.outcome.error):
            return done
        self._has_failed(request, done, before)
        return self._send(request, done, _lines_after(done), follows=True, repeat=Repeat.CONTINUE)

    def _remembered(self, before: _Attempt | None) -> int | None:
        """Return the number of the failed cell that ranks are to remember, or to continue."""
        if before is not None:
            return before.number
        newest = self._failed_loop or self._failed
        return newest[1].number if newest else None

    def _send(
        self,
        request: CellRequest,
        before: _Attempt | None,
        notice: str,
        *,
        follows: bool,
        repeat: Repeat = Repeat.NO,
    ) -> _Attempt:
        """Send the cell to the ranks, and show how it ends; see `_attempt`."""
        self._count += 1
        prompt = request.prompt or self._count
        attempt = CellAttempt.of(
            request,
            self._count,
            prompt=prompt,
            failed=self._remembered(before),
            repeat=repeat,
            profile=self._to_profile(request.profile, prompt),
            faults=self._cluster.faults(),
            session_s=self._cluster.events.seconds,
            keep=self._cluster.memory is not None,
        )
        run = before.run if before else None
        return self._follow(attempt, before, notice, follows=follows, run=run)

    def _follow(
        self,
        attempt: CellAttempt,
        before: _Attempt | None,
        notice: str,
        *,
        follows: bool,
        run: str | None,
        memory: Mapping[str, Any] | None = None,
    ) -> _Attempt:
        """Follow an attempt to its end, and show it; with `memory` another kernel has sent it.

        `run` is the MLflow run that it continues.
        """
        request = attempt.request
        world_size = len(self._cluster.ranks)  # there may be fewer afterwards
        with Interrupts() as interrupts:
            shown = self._showing.begin(
                attempt,
                self._cluster,
                interrupts=interrupts,
                continues=run,
                attached=memory is not None,
                above=before.shown.left if before and follows else request.above,
            )
            shown.say(request.heading if not follows else "")
            shown.say(notice)
            if not request.call:
                self.shown = shown
            heard = _hear_collectives(request.profile, shown)
            outcome = self._outcome(attempt, shown, interrupts, memory)
            if not request.call:
                self.last = outcome.result()
            if request.profile is not None and heard is not None:
                self.profile = self._profiled(request.profile, outcome, heard, shown)
            shown.end(outcome, self.profile if heard is not None else None)
        if outcome.error is None and interrupts.count:
            outcome.error = Interrupted(
                f"{request.ran.title} had already ended; its output is complete."
            )
        if self._cluster.memory is not None:
            self._cluster.memory.cell_ended()
        run = shown.run_key or run
        return _Attempt(attempt.start.number, outcome, shown, run, world_size)

    def _outcome(
        self,
        attempt: CellAttempt,
        shown: ShownCell,
        interrupts: Interrupts,
        memory: Mapping[str, Any] | None,
    ) -> Outcome:
        """Run an attempt, or with `memory` the rest of what another kernel has sent."""
        parts = shown.slots, shown.telemetry, shown.tick, interrupts, shown.checks
        if memory is None:
            return CellRun(self._cluster, attempt, *parts).run()
        cell = AttachedCell(self._cluster, attempt, *parts)
        cell.follow(memory)
        outcome = cell.run()
        for line in cell.gone:
            shown.say(line)
        return outcome

    def _prompt(self) -> int:
        """Return the number of a cell that was given none: the notebook's, where this is one."""
        shell = kernel_shell()
        return self._count + 1 if shell is None else max(1, int(shell.displayhook.prompt_count))

    def _to_profile(self, chosen: ChosenSteps | None, prompt: int) -> ProfileSteps | None:
        """Return the steps to record in the newest cell, and where ranks write them."""
        if chosen is None:
            return None
        self._profiled_cells[prompt] += 1
        folder = folder_of(self._cluster.logs, prompt, self._profiled_cells[prompt])
        self._profile_folder = folder
        return ProfileSteps(chosen.first, chosen.last, str(folder / "ranks"))

    def _profiled(
        self, chosen: ChosenSteps, outcome: Outcome, heard: ProfiledCollectives, shown: ShownCell
    ) -> Profiled:
        steps_made = {rank: c.summary.steps for rank, c in outcome.collectors.items()}
        folder = self._profile_folder
        assert folder is not None  # the ranks got it with the cell
        clocks = shown.clocks_after_all()
        received = heard.calls_by_rank()
        return gather(self._cluster, folder, chosen, steps_made, received, clocks.offset_ns)


def _as_changed(request: CellRequest, done: _Attempt) -> CellRequest:
    """Return the cell with the parameters that were changed by hand while it ran, as they are."""
    changes = done.shown.telemetry.changes
    changed = {one.name: one.value for one in changes if one.name in request.params}
    return replace(request, params={**request.params, **changed}) if changed else request


def _changed_lines(asked: CellRequest, now: CellRequest) -> tuple[str, ...]:
    """Return that an attempt has other parameters than it was asked for, in a sentence."""
    names = [name for name, value in now.params.items() if value is not asked.params[name]]
    values = ", ".join(f"{name} = {now.params[name]!r}" for name in names)
    return (f"It begins with {values}, as changed by hand.",) if names else ()


def _hear_collectives(chosen: ChosenSteps | None, shown: ShownCell) -> ProfiledCollectives | None:
    """Keep the collectives of the steps to profile as their records come; None without any."""
    if chosen is None:
        return None
    heard = ProfiledCollectives(chosen)
    shown.telemetry.subscribe(heard.receive)
    return heard


def _lines_after(done: _Attempt) -> str:
    """Return the notice after an attempt without effect: only what it has cost."""
    repaired = done.outcome.repaired
    return " ".join(repaired.lines) if repaired.replaced else ""


def ranks_again(
    asked: tuple[int, ...], of: int, now: tuple[int, ...], ran: WhatRan = A_CELL
) -> tuple[int, ...]:
    """Return where a cell runs again: on all ranks of now, where it ran on all that there were.

    Args:
        asked: Where it ran.
        of: How many ranks there were then.
        now: Those that there are.
        ran: What ran there.

    Raises:
        ClusterError: It ran on some ranks, and one of them is gone.
    """
    if len(asked) == of:
        return now
    if gone := [rank for rank in asked if rank not in now]:
        raise ClusterError(
            f"{ran.title} cannot be run again: it ran on {name_ranks(gone)}, and there are "
            f"{counted(len(now), 'rank')} now.",
            why="%dist scale or the loss of a host has taken away where it ran.",
            do=f"run {ran.itself}, with -r for ranks that there are.",
        )
    return asked


def announcement(attempt: int, of: int, error: RankError, repaired: tuple[str, ...]) -> str:
    """Return the notice above an attempt that follows a failed one."""
    causes = "; ".join(error.causes).rstrip(".")
    return " ".join([f"Attempt {attempt} of {of}, after: {causes}.", *repaired])


def _in_a_sentence(error: NBDistError) -> str:
    said = " ".join(filter(None, (error.what, error.why)))
    return f"{said[0].lower()}{said[1:]}"


def _why_not_again(
    done: _Attempt,
    before: _Attempt | None,
    attempt: int,
    retries: int,
    ran: WhatRan,
    *,
    can_restore: bool,
) -> str:
    """Return why a cell that failed is not run again, or an empty text.

    With `can_restore`, state that was lost with a rank may come back from a checkpoint.
    """
    if attempt > retries:
        return f"this was the last of {retries + 1} attempts."
    if not done.outcome.repaired.is_cloned and not can_restore:
        return f"the state of the ranks could not be restored, so {ran.name} was not run again."
    if done.outcome.repaired.is_half:
        return f"a step is half done, so {ran.name} was not run again by itself."
    error = done.outcome.error
    is_lost = isinstance(error, RankError) and any(
        uses_what_is_lost(ename) for ename, _ in error.failures.values()
    )
    if is_lost and not can_restore:
        return "it uses state that was lost with a rank, and another attempt cannot restore it."
    if before is not None and isinstance(error, RankError):
        earlier = before.outcome.error
        is_same = isinstance(earlier, RankError) and earlier.causes == error.causes
        if is_same and not done.made_steps:
            return (
                f"attempt {attempt} failed like the one before, without a step, so {ran.name} was "
                "not run again."
            )
    return ""
