"""The newest cell that has trained: what `%dist expect` asks about, and the runs before it.

Runs are remembered as long as the kernel lives, also after `%dist stop`: more ranks often come with
a new start.
"""

from collections import deque
from dataclasses import dataclass

from nbdist.client.cells import estimates
from nbdist.client.metrics.analysis.cell_analysis import CellAnalysis
from nbdist.client.metrics.analysis.clocks import Clocks
from nbdist.client.metrics.analysis.values import Analysis, Straggler
from nbdist.client.metrics.checks.cell_checks import CellChecks
from nbdist.client.metrics.telemetry import CellInfo, Telemetry
from nbdist.client.metrics.usual_step import RunFigures, UsualSteps
from nbdist.shared.text import counted
from nbdist.study.beside import Beside

_MOST_RUNS = 500
_WAYS = {"failed": "failed", "interrupted": "was interrupted"}


@dataclass(frozen=True, slots=True)
class HeardCell:
    """A cell that runs, and what hears its records: they come to `telemetry`."""

    info: CellInfo
    telemetry: Telemetry
    clocks: Clocks
    insight: CellAnalysis
    checks: CellChecks

    def __post_init__(self) -> None:
        """Have it explained and checked from its first record on."""
        self.telemetry.subscribe(self.insight.receive)
        self.telemetry.subscribe(self.checks.receive)


@dataclass(frozen=True, slots=True)
class TrainedCell:
    """A cell that has made steps or logged numbers, and is over.

    `before` are the figures of the run of its name that went well before it in this kernel, on as
    many ranks; None without one, or without a name. `cut_off` is empty of a cell that finished, and
    else says how it ended: "failed after 3 steps". `beside` compares it with its estimate.
    """

    info: CellInfo
    telemetry: Telemetry
    figures: RunFigures | None
    alarms: tuple[str, ...]
    analysis: Analysis
    before: RunFigures | None
    cut_off: str
    beside: Beside | None = None

    @property
    def verdicts(self) -> tuple[Straggler, ...]:
        """The ranks that made others slow, and why."""
        return self.analysis.verdicts


class OpenCell:
    """A cell that runs, as far as it is needed when it is over."""

    def __init__(self, cell: HeardCell) -> None:
        """Hear the cell's records from here on."""
        self._cell = cell
        self._steps = UsualSteps(cell.info)
        cell.telemetry.subscribe(self._steps.receive)

    def close(self, ended: str) -> TrainedCell | None:
        """Return the cell, which has `finished` or else; None where it has not trained."""
        if not self._cell.telemetry.first_record.is_set():
            return None
        figures = self._steps.figures(self._cell.telemetry)
        name, ranks = self._cell.info.run_name, len(self._cell.info.ranks)
        before = here.newest(name, ranks)
        if ended == "finished" and name is not None and figures is not None:
            here.add(name, figures)
        steps = figures.steps if figures is not None else 0
        return TrainedCell(
            self._cell.info,
            self._cell.telemetry,
            figures,
            self._cell.checks.found,
            self._cell.insight.now(),
            before,
            "" if ended == "finished" else f"{_WAYS[ended]} after {counted(steps, 'step')}",
            estimates.here.beside(self._cell.telemetry, figures),
        )


class FinishedRuns:
    """The figures of the runs that went well in a kernel, oldest first."""

    def __init__(self) -> None:
        self._runs: deque[tuple[str, RunFigures]] = deque(maxlen=_MOST_RUNS)

    def add(self, name: str, figures: RunFigures) -> None:
        """Note a run that went well."""
        self._runs.append((name, figures))

    def newest(self, name: str | None, ranks: int) -> RunFigures | None:
        """Return the newest of that name on so many ranks."""
        runs = [run for of, run in self._runs if of == name and run.world_size == ranks]
        return runs[-1] if runs else None


here = FinishedRuns()
