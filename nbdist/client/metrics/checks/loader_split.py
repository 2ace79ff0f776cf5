"""Notice that ranks cut their batches from different orders: samples are then given twice, or not.

Threads: ipyparallel's IO thread.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from nbdist.client.metrics.checks.starving import LoaderFacts
from nbdist.shared.wire import Record

_MOST_OPEN = 256  # loops that not all ranks have begun

_Line = tuple[int, int]  # prompt and line of the cell that has made the loader


class LoaderSplit:
    """Compares, between ranks, what decides the batches of each loop over an `nbdist.loader`."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = frozenset(ranks)
        self._begun: Counter[tuple[int, _Line]] = Counter()  # loops, by rank and line
        self._open: defaultdict[tuple[_Line, int], dict[int, float]] = defaultdict(dict)

    def take(self, record: Record) -> str:
        """Take in that a loop begins; return what is wrong with it, or nothing."""
        if record.kind != "loader" or "order" not in record.values:
            return ""
        line = int(record.values["prompt"]), int(record.values["line"])
        self._begun[record.rank, line] += 1
        loop = line, self._begun[record.rank, line]
        orders = self._open[loop]
        orders[record.rank] = record.values["order"]
        if orders.keys() != self._ranks:
            if len(self._open) > _MOST_OPEN:
                del self._open[next(iter(self._open))]
            return ""
        del self._open[loop]
        if len(set(orders.values())) == 1:
            return ""
        name = LoaderFacts(*line).name
        return (
            f"{name[0].upper()}{name[1:]} is another one on each rank: its seed, shuffle, "
            "global_batch, drop_last or data differ, so samples are given twice or never. "
            "Create it with the same arguments on all ranks."
        )
