"""What rules on the use of one model read: the steps that all ranks have reported, oldest first.

No rule decides on a single step where chance could make it look wrong.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from nbdist.client.metrics.checks.rule import WatchedCell, Watcher
from nbdist.shared.wire import Record

MOST_STEPS = 16  # of which ranks reported, whole or not
ENOUGH = 5  # the step from which "never" is meant

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Step:
    """What all ranks reported of one step, by rank: "use" rows of `engine/checks/use`.

    `samples` are those that each rank had in it, where its step's record has come, and tells.
    """

    number: int
    by_rank: Mapping[int, Values]
    samples: Mapping[int, float] = field(default_factory=dict)

    def of(self, name: str) -> dict[int, float]:
        """Return one value of the ranks that reported it."""
        return {rank: values[name] for rank, values in self.by_rank.items() if name in values}

    @property
    def parts(self) -> int:
        """Into how many parts a batch is cut; 0 of a model that nothing spreads."""
        return int(max(self.of("parts").values(), default=0))


@dataclass(frozen=True, slots=True)
class Seen:
    """One optimizer's steps in a cell.

    `first` is what ranks reported before the first one. `collectives` counts those of all steps of
    all ranks, None where ranks do not tell. `rates` are the ranks' learning rates.
    """

    steps: Sequence[Step]
    first: Step | None = None
    collectives: float | None = None
    rates: frozenset[float] = frozenset()

    @property
    def last(self) -> Step:
        """The newest step."""
        return self.steps[-1]


class Uses(Watcher[Seen]):
    """One cell's optimizers."""

    kinds = frozenset(("use", "step", "optimizer"))

    def __init__(self, cell: WatchedCell) -> None:
        """Begin with nothing known."""
        self._ranks = frozenset(cell.ranks)
        self._open: dict[tuple[float, int], dict[int, dict[str, float]]] = {}
        self._first: dict[float, Step] = {}
        self._steps: defaultdict[float, deque[Step]] = defaultdict(lambda: deque(maxlen=MOST_STEPS))
        self._records: deque[Record] = deque(maxlen=64 * len(self._ranks))  # of steps
        self._collectives: float | None = None
        self._rates: set[float] = set()

    def take(self, record: Record) -> Seen | None:
        """Take in a record; return the steps so far, where all ranks have reported another one."""
        if record.kind == "step":
            self._take_step(record)
        elif record.kind == "optimizer":
            self._rates.add(record.values["lr"])
        elif record.kind == "use":
            return self._take_use(record)
        return None

    def _take_step(self, record: Record) -> None:
        if "collectives" in record.values:
            self._collectives = (self._collectives or 0.0) + record.values["collectives"]
        self._records.append(record)

    def _take_use(self, record: Record) -> Seen | None:
        number = record.values.get("optimizer", 0.0)
        by_rank = self._open.setdefault((number, record.step), {})
        by_rank[record.rank] = record.values
        if by_rank.keys() < self._ranks:
            while len(self._open) > MOST_STEPS:
                del self._open[next(iter(self._open))]
            return None
        del self._open[number, record.step]
        step = Step(record.step, by_rank)
        if record.step == 0:
            self._first[number] = step
            return None
        steps = self._steps[number]
        steps.append(step)
        return Seen(
            [self._with_records(step) for step in steps],
            self._first.get(number),
            self._collectives,
            frozenset(self._rates),
        )

    def _with_records(self, step: Step) -> Step:
        of_step = {one.rank: one.values for one in self._records if one.step == step.number}
        had = {rank: values["samples"] for rank, values in of_step.items() if "samples" in values}
        return replace(step, samples=had)
