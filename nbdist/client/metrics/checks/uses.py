"""Put together what ranks tell of each optimizer, and ask the rules of `wrong_use`."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from nbdist.client.metrics.checks.wrong_use import RULES, Seen, Step
from nbdist.shared.wire import Record

MOST_STEPS = 16  # of which ranks reported, whole or not


class Uses:
    """One cell's optimizers."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """Begin with nothing known of these ranks."""
        self._ranks = frozenset(ranks)
        self._open: dict[tuple[float, int], dict[int, dict[str, float]]] = {}
        self._first: dict[float, Step] = {}
        self._steps: defaultdict[float, deque[Step]] = defaultdict(lambda: deque(maxlen=MOST_STEPS))
        self._bytes: deque[tuple[int, int, float]] = deque(maxlen=64 * len(self._ranks))
        self._collectives: float | None = None
        self._rates: set[float] = set()

    def take(self, record: Record) -> dict[str, str]:
        """Take in a record; return sentences by the rule that found something."""
        if record.kind == "step":
            self._take_step(record)
        elif record.kind == "optimizer":
            self._rates.add(record.values["lr"])
        elif record.kind == "use":
            return self._take_use(record)
        return {}

    def _take_step(self, record: Record) -> None:
        if "collectives" in record.values:
            self._collectives = (self._collectives or 0.0) + record.values["collectives"]
        self._bytes.append((record.rank, record.step, record.values.get("bytes", 0.0)))

    def _take_use(self, record: Record) -> dict[str, str]:
        number = record.values.get("optimizer", 0.0)
        by_rank = self._open.setdefault((number, record.step), {})
        by_rank[record.rank] = record.values
        if by_rank.keys() < self._ranks:
            while len(self._open) > MOST_STEPS:
                del self._open[next(iter(self._open))]
            return {}
        del self._open[number, record.step]
        step = Step(record.step, by_rank)
        if record.step == 0:
            self._first[number] = step
            return {}
        steps = self._steps[number]
        steps.append(step)
        seen = Seen(
            [replace(step, bytes=self._sent_in(step.number)) for step in steps],
            self._first.get(number),
            self._collectives,
            frozenset(self._rates),
        )
        return {rule.__name__: said for rule in RULES if (said := rule(seen))}

    def _sent_in(self, step: int) -> dict[int, float]:
        return {rank: sent for rank, number, sent in self._bytes if number == step}
