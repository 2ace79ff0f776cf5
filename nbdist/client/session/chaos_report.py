"""The outcome of planned faults, from the events of a cluster. Pure.

A fault is *survived* when the cluster could continue: no event says that it is broken. A cell that
fails *recovers* from the first fault in it until its end, when all ranks are ready again.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nbdist.shared.text import counted

# A rank that is held still delays a cell, and fails none.
_FAILING = ("kill", "raise", "interrupt")


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """Figures of all cells since the chaos began. Prints as a few lines.

    `cells` counts their attempts, `failed` those that a fault ended. `faults` counts by kind.
    `recoveries_s` has one number a failed attempt, in order. `running_s` is the time in which cells
    ran, their recoveries included. `steps_done` counts optimizer steps, those of the rank that made
    most of them; `steps_kept` is what recoveries left of them.
    """

    faults: Mapping[str, int]
    missed: int
    cells: int
    failed: int
    recoveries_s: tuple[float, ...]
    running_s: float
    steps_done: int
    steps_kept: int
    lost_sessions: int

    @property
    def goodput(self) -> float:
        """Steps kept of steps done; 1 when there were none."""
        return self.steps_kept / self.steps_done if self.steps_done else 1.0

    def __str__(self) -> str:
        total = sum(self.faults.values())
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        missed = f"; {self.missed} found no living rank" if self.missed else ""
        lost = self.lost_sessions
        lines = [
            f"Faults:    {total}{f' ({kinds})' if kinds else ''}{missed}",
            f"Cells:     {counted(self.cells, 'attempt')}, {self.failed} failed by these faults",
            f"Sessions:  {lost or 'none'} lost",
            f"Steps:     {self.steps_kept} kept of {self.steps_done}, {self.goodput:.1%}",
        ]
        if self.recoveries_s:
            times = sorted(self.recoveries_s)
            lines.append(
                f"Recovery:  median {statistics.median(times):.2f} s, 95 % within "
                f"{within(times, 0.95):.2f} s, longest {times[-1]:.2f} s; "
                f"{sum(times):.1f} s of {self.running_s:.1f} s"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


def report(events: Iterable[Mapping[str, Any]]) -> ChaosReport:
    """Return the outcome of the faults among these events, which are oldest first."""
    faults: Counter[str] = Counter()
    missed = cells = failed = lost_sessions = done = lost_steps = 0
    running_s = 0.0
    recoveries: list[float] = []
    begun_s: float | None = None
    struck_s: float | None = None
    for event in events:
        name = event["event"]
        if name == "fault":
            faults[event["cause"]] += 1
            if struck_s is None and event["cause"] in _FAILING:
                struck_s = event["s"]
        elif name == "fault missed":
            missed += 1
        elif name == "broken":
            lost_sessions += 1
        elif name == "re-formed":
            lost_steps += event.get("steps_lost", 0)
        elif name == "cell begun":
            begun_s, struck_s = event["s"], None
            cells += 1
        elif name == "cell ended":
            done += max(event["steps"].values(), default=0)
            running_s += event["s"] - (event["s"] if begun_s is None else begun_s)
            begun_s = None
            if event["outcome"] == "failed" and struck_s is not None:
                failed += 1
                recoveries.append(event["s"] - struck_s)
    return ChaosReport(
        faults=dict(faults),
        missed=missed,
        cells=cells,
        failed=failed,
        recoveries_s=tuple(recoveries),
        running_s=running_s,
        steps_done=done,
        steps_kept=done - lost_steps,
        lost_sessions=lost_sessions,
    )


def within(ordered: list[float], share: float) -> float:
    """Return the smallest of these numbers that at least this share of them do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]
