"""What the analysis finds of single steps, as lines: who waited, who moved data, who came last.

`add` runs on the analysis thread; the lines may be read on any.
"""

from collections.abc import Mapping, Sequence

from nbdist.client.board.scene.scene import ALL
from nbdist.client.metrics.analysis.values import ExplainedStep
from nbdist.client.metrics.detail import Detail, Part
from nbdist.client.metrics.telemetry import History, Series


class ExplainedLines:
    """Lines by name and rank, of milliseconds; of "last" it is a rank, and the line is of all.

    Attributes:
        count: Steps that were taken in.
    """

    def __init__(self, detail: Detail | None = None) -> None:
        """Begin without lines; `detail` keeps points that are thinned."""
        self.count = 0
        self._detail = detail
        self._lines: dict[str, dict[int, History]] = {}

    def add(self, steps: Sequence[ExplainedStep]) -> None:
        """Take steps as they are explained, in order."""
        for step in steps:
            for rank, waiting_ms in step.waiting_ms.items():
                self._put("part.waiting", rank, step.step, waiting_ms)
                self._put("part.transfer", rank, step.step, step.transfer_ms[rank])
            if step.last is not None:
                self._put("last", ALL, step.step, step.last)
        self.count += len(steps)  # last: readers look for lines when it has grown

    def keys(self) -> list[str]:
        """Return the names of the lines."""
        return list(self._lines)

    def series(self, key: str) -> Mapping[int, Series]:
        """Return a line of each rank that has one."""
        by_rank = dict(self._lines.get(key, {}))
        return {rank: history.snapshot() for rank, history in sorted(by_rank.items())}

    def between(self, key: str, rank: int, low: float, high: float, enough: int) -> Part:
        """Return a part of a line, see `History.between`."""
        return self._lines[key][rank].between(low, high, enough)

    def _put(self, name: str, rank: int, step: int, value: float) -> None:
        of_ranks = self._lines.setdefault(name, {})
        if rank not in of_ranks:
            of_ranks[rank] = History(detail=self._detail)
        of_ranks[rank].extend((step,), (value,))
