"""The estimates of a kernel, until a training shows what was true of them. Any thread."""

from collections import deque

from nbdist.client.metrics.telemetry import Telemetry
from nbdist.client.metrics.usual_step import RunFigures
from nbdist.study.beside import Beside, Measured, matching
from nbdist.study.estimate import Estimate

_MOST = 100


class Estimates:
    """Those of `nbdist.estimate`, oldest first."""

    def __init__(self) -> None:
        self._all: deque[Estimate] = deque(maxlen=_MOST)

    def add(self, estimate: Estimate) -> None:
        """Note one."""
        self._all.append(estimate)

    def beside(self, telemetry: Telemetry, figures: RunFigures | None) -> Beside | None:
        """Return the newest one of a training's model and layout, with what was measured."""
        if figures is None or not self._all:
            return None
        facts = next(iter(dict(telemetry.facts).values()), {})
        found = matching(tuple(self._all), facts, figures.world_size)
        if found is None:
            return None
        peaks = [max(one.values[: one.n]) for one in telemetry.series("peak_bytes").values()]
        collectives = [sum(kinds.values()) for kinds in figures.kinds]
        return Beside(found, Measured(collectives, figures.bytes, max(peaks, default=None)))


here = Estimates()
