"""Run a cell once for each value of the lists it was given: `-p lr=[1e-3,3e-4]`.

Several lists are tried in all combinations. In MLflow the runs are nested under one, the *study*.
An error or an interrupt ends the sweep like any cell; the runs so far are kept.

Main thread only.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nbdist.client.cells.cell_context import CellContext
from nbdist.client.cells.request import CellRequest
from nbdist.client.cells.retries import CellAttempts
from nbdist.client.output.result import CellResult
from nbdist.client.output.slots import Display, Slots
from nbdist.shared.errors import UsageError

if TYPE_CHECKING:
    from nbdist.client.tracking.past.compare import Comparison, Entry
    from nbdist.client.tracking.study import Study
    from nbdist.client.tracking.writing import Outcome

MOST_RUNS = 64

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a sweep: what it tried, and what its ranks gave."""

    values: Values
    result: CellResult


@dataclass(frozen=True, slots=True)
class SweepResult(Sequence[SweepRun]):
    """The runs of a sweep, in order; prints as their table."""

    runs: tuple[SweepRun, ...]
    table: "Comparison"

    def __getitem__(self, index: Any) -> Any:
        return self.runs[index]

    def __len__(self) -> int:
        return len(self.runs)

    def __repr__(self) -> str:
        return str(self.table)


_ONE = 'session.sweep(code, {"lr": [0.1, 0.01]})'


def combinations(lists: Mapping[str, Sequence[Any]]) -> tuple[Values, ...]:
    """Return what each run tries; the last list changes fastest.

    Raises:
        UsageError: A list is empty, or there are more than `MOST_RUNS` runs.
    """
    if not isinstance(lists, Mapping) or not lists:
        raise UsageError(
            f"A sweep takes a dict of names and lists of values, not {lists!r}.", do=_ONE
        )
    for name, values in lists.items():
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            raise UsageError(f"A sweep takes a list of values for {name}, not {values!r}.", do=_ONE)
        if not values:
            raise UsageError(f"-p {name}=[] has no value to run the cell with.")
    count = math.prod(len(values) for values in lists.values())
    if count > MOST_RUNS:
        sizes = " x ".join(f"{len(values)} {name}" for name, values in lists.items())
        raise UsageError(
            f"{sizes} would be {count} runs; a sweep makes {MOST_RUNS} at most. "
            "A tuple is one value: -p sizes=(1,2)."
        )
    return tuple(
        dict(zip(lists, chosen, strict=True)) for chosen in itertools.product(*lists.values())
    )


def said_of(values: Mapping[str, Any]) -> str:
    """Return what a run tries, for people: `lr=0.001 width=64`."""
    return " ".join(f"{name}={value!r}" for name, value in values.items())


def announcement(lists: Mapping[str, Sequence[Any]], count: int) -> str:
    """Return the notice before a sweep starts."""
    if len(lists) == 1:
        (name,) = lists
        return f"{count} runs of this cell, one for each {name}."
    sizes = " x ".join(f"{len(values)} {name}" for name, values in lists.items())
    return f"{count} runs of this cell, one for each combination of {sizes}."


def sweep(
    attempts: CellAttempts,
    showing: CellContext,
    request: CellRequest,
    lists: Mapping[str, Sequence[Any]],
    retries: int = 0,
) -> SweepResult:
    """Run a cell once for each combination of values.

    Args:
        attempts: Runs cells.
        showing: Tracks them.
        request: The cell; its `params` are those that all runs share.
        lists: What is tried, by the names of the params.
        retries: As for one cell, for each run.

    Raises:
        UsageError: As `combinations`; else what the run raises that ended the sweep.
    """
    tried = combinations(lists)
    name = request.run_name or f"{'-'.join(lists)}-sweep"
    study = showing.begin_study(name, request.code, lists) if request.track else None
    return _Sweep(attempts, request, tried, study, announcement(lists, len(tried))).run(retries)


class _Sweep:
    """One sweep while it runs."""

    def __init__(
        self,
        attempts: CellAttempts,
        request: CellRequest,
        tried: tuple[Values, ...],
        study: "Study | None",
        notice: str,
    ) -> None:
        self._attempts = attempts
        self._request = request
        self._tried = tried
        self._study = study
        self._left: list[Display] = []  # what the notebook's cell shows by now
        self._runs: list[SweepRun] = []
        self._entries: list[Entry] = []
        self._say(notice)

    def run(self, retries: int) -> SweepResult:
        """Run them all; what ends one early ends the sweep."""
        for place, values in enumerate(self._tried):
            heading = f"Run {place + 1} of {len(self._tried)}: {said_of(values)}"
            try:
                result = self._run(values, heading, retries)
            except BaseException as error:
                # Whatever it is, an interrupt too: report the runs so far, and let it propagate.
                outcome: Outcome = (
                    "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
                )
                self._note(values, outcome)
                self._end(outcome, error, place)
                raise
            self._runs.append(SweepRun(values, result))
            self._note(values, "finished")
        return SweepResult(tuple(self._runs), self._end("finished", None, len(self._tried)))

    def _run(self, values: Values, heading: str, retries: int) -> CellResult:
        self._attempts.shown = None
        request = replace(
            self._request,
            params={**self._request.params, **values},
            run_name=_name_of(values),
            study=self._study.key if self._study is not None else None,
            heading=heading,
            above=tuple(self._left),
        )
        try:
            return self._attempts.run(request, retries)
        finally:
            if self._attempts.shown is not None:
                self._left = list(self._attempts.shown.left)

    def _note(self, values: Values, state: str) -> None:
        """Remember the outcome of a run, as far as it trained."""
        from nbdist.client.tracking.curves import curves_of
        from nbdist.client.tracking.names import params_of
        from nbdist.client.tracking.past.compare import entry_of

        shown = self._attempts.shown
        if shown is None:
            return  # it was refused before it ran
        latest = shown.telemetry.latest.values()
        steps = int(max((values.get("step", 0) for values in latest), default=0))
        curves = curves_of(shown.telemetry.series)
        self._entries.append(entry_of(_name_of(values), state, steps, params_of(values), curves))

    def _end(self, outcome: "Outcome", error: BaseException | None, done: int) -> "Comparison":
        """Show the table of the runs so far, and end the study."""
        from nbdist.client.tracking.past.compare import Comparison, rows_of

        table = Comparison(tuple(self._entries))
        if error is not None:
            before = "the one before it is" if done == 1 else f"the {done} before it are"
            kept = f"{before} kept" if done else ""
            skipped = len(self._tried) - done - 1
            left = f"{skipped} {'was' if skipped == 1 else 'were'} not begun" if skipped else ""
            parts = [f"The sweep has ended with run {done + 1} of {len(self._tried)}", kept, left]
            self._say("; ".join(part for part in parts if part) + ".")
        if self._entries:
            self._leave(Display({"text/plain": str(table), "text/html": table._repr_html_()}))
        if self._study is not None:
            why = str(error) if error is not None else None
            best = " ".join(table.sentences)
            self._study.finish(outcome, why, rows_of(self._entries), best)
        return table

    def _say(self, line: str) -> None:
        self._leave(Display({"text/plain": line}))

    def _leave(self, display: Display) -> None:
        if self._request.show:
            Slots(live=False).settle([display])
            self._left.append(display)


def _name_of(values: Values) -> str:
    """Return a run's name: what it tries, where that is short and no secret."""
    from nbdist.client.tracking.names import run_name_of

    return run_name_of(values) or "-".join(values)
