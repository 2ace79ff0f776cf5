"""What rules on the use of one model read: the steps that all ranks have reported, oldest first.

No rule decides on a single step where chance could make it look wrong.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps

from nbdist.client.metrics.checks.rule import WatchedCell, Watcher
from nbdist.shared.wire import Record

MOST_STEPS = 16  # of which ranks reported, whole or not
_MOST_OPEN = 64  # steps of which ranks have told their samples
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
    # Each rule asks for its values of each step, at each of the next reports again.
    _known: dict[str, Mapping[int, float]] = field(default_factory=dict, repr=False, compare=False)

    def of(self, name: str) -> Mapping[int, float]:
        """Return one value of the ranks that reported it."""
        found = self._known.get(name)
        if found is None:
            values = self.by_rank.items()
            found = self._known[name] = {rank: one[name] for rank, one in values if name in one}
        return found

    def tells(self, names: Sequence[str]) -> bool:
        """Return whether a rank reported one of these values, and not 0."""
        return any(any(self.of(name).values()) for name in names)

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


Decide = Callable[[Seen], str]


def where_told(*names: str) -> Callable[[Decide], Decide]:
    """Have a rule decide on steps alone in which a rank reports one of these values, and not 0.

    Of nearly all steps none is what most rules look for, and to find that out costs each of them
    what all together may.
    """

    def decorate(decide: Decide) -> Decide:
        @wraps(decide)
        def decide_where_told(seen: Seen) -> str:
            return decide(seen) if seen.last.tells(names) else ""

        return decide_where_told

    return decorate


class Uses(Watcher[Seen]):
    """One cell's optimizers."""

    kinds = frozenset(("use", "step", "optimizer"))

    def __init__(self, cell: WatchedCell) -> None:
        """Begin with nothing known."""
        self._ranks = frozenset(cell.ranks)
        self._open: dict[tuple[float, int], dict[int, dict[str, float]]] = {}
        self._first: dict[float, Step] = {}
        self._steps: defaultdict[float, deque[Step]] = defaultdict(lambda: deque(maxlen=MOST_STEPS))
        self._samples: dict[int, dict[int, float]] = {}  # by step and rank
        self._collectives: float | None = None
        self._rates: set[float] = set()

    def take(self, record: Record) -> Seen | None:
        """Take in a record; return the steps so far, where all ranks have reported another one."""
        if record.kind == "step":  # as nearly all are
            values = record.values
            if "collectives" in values:
                self._collectives = (self._collectives or 0.0) + values["collectives"]
            if "samples" in values:
                self._samples_in(record.step)[record.rank] = values["samples"]
        elif record.kind == "optimizer":
            self._rates.add(record.values["lr"])
        elif record.kind == "use":
            return self._take_use(record)
        return None

    def _samples_in(self, step: int) -> dict[int, float]:
        """Return the samples of ranks in a step; what comes later is added to it."""
        found = self._samples.get(step)
        if found is None:
            found = self._samples[step] = {}
            if len(self._samples) > _MOST_OPEN:
                del self._samples[next(iter(self._samples))]
        return found

    def _take_use(self, record: Record) -> Seen | None:
        number = record.values.get("optimizer", 0.0)
        by_rank = self._open.setdefault((number, record.step), {})
        by_rank[record.rank] = record.values
        if by_rank.keys() < self._ranks:
            while len(self._open) > MOST_STEPS:
                del self._open[next(iter(self._open))]
            return None
        del self._open[number, record.step]
        step = Step(record.step, by_rank, self._samples_in(record.step))
        if record.step == 0:
            self._first[number] = step
            return None
        steps = self._steps[number]
        steps.append(step)
        return Seen(
            list(steps),
            self._first.get(number),
            self._collectives,
            frozenset(self._rates),
        )
