"""Measure what watching costs: ask the ranks, and count what the notebook spends meanwhile.

A cell counts from its first step on, until it ends. Main thread, but `cost`, which is any's.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from nbdist.client.cells.status import answers
from nbdist.client.cluster.cluster import Cluster
from nbdist.client.metrics import usage
from nbdist.client.metrics.cost import Cost, RankCost, cost_of
from nbdist.client.metrics.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class _Moment:
    """Progress of a training, and what had been spent by then."""

    steps: int
    seconds: Mapping[str, float]


class CostMeter:
    """The cost in one session: in its newest cell that trains."""

    def __init__(self) -> None:
        self._telemetry: Telemetry | None = None
        self._newest: Telemetry | None = None  # of the last cell that trained, however short
        self._ranks: Callable[[], Collection[int]] = set
        self._began: _Moment | None = None
        self._ended: _Moment | None = None

    def begin(self, telemetry: Telemetry, pids: Callable[[], Collection[int]]) -> None:
        """Count from here on; a cell has made its first steps. Only its first call does that.

        Args:
            telemetry: Of the cell.
            pids: Returns those of the ranks of this machine now.
        """
        if telemetry is self._telemetry:
            return
        self._telemetry = self._newest = telemetry
        self._ranks, self._ended = pids, None
        self._began = self._now(telemetry)

    def end(self, telemetry: Telemetry) -> None:
        """The cell has ended; one that did not train is none of ours."""
        if telemetry is self._telemetry:
            self._ended = self._now(telemetry)
        elif telemetry.first_record.is_set():  # too short to be counted beside the ranks
            self._telemetry = self._began = self._ended = None
            self._newest = telemetry

    def cost(self, cluster: Cluster) -> Cost:
        """Return what watching costs now, or has cost in the last cell that trained."""
        requests = cluster.requests
        # A rank that was not in that cell would report an earlier one.
        asked = [r for r in cluster.living() if self._newest is None or r in self._newest.latest]
        reported = answers({rank: requests.ask(rank, "control.cost", busy=True) for rank in asked})
        ranks = [RankCost(**cost) for cost in reported.values() if cost]
        if self._telemetry is None or self._began is None:
            return cost_of(ranks, {}, 0)
        now = self._ended or self._now(self._telemetry)
        spent = {
            part: seconds - self._began.seconds.get(part, 0.0)
            for part, seconds in now.seconds.items()
        }
        return cost_of(ranks, spent, now.steps - self._began.steps)

    def _now(self, telemetry: Telemetry) -> _Moment:
        steps = max((int(latest.get("step", 0)) for latest in telemetry.latest.values()), default=0)
        return _Moment(steps, {**usage.in_threads(), **usage.in_processes(self._ranks())})
