"""Notice that what must be equal on all ranks differs: weights, and batch norm's statistics.

Ranks tell fingerprints of the same steps of a model: of a cell's second one its names begin with
"1:". Those of one name are of the same numbers, whichever rank tells them: any difference is one.

Of weights whose gradients a loop averages by itself they tell, too. What is meant is not known
there: only those that all ranks begin the cell with are to stay equal.

At a cell's end they tell of all models that are alive, whether the cell has used them or not. What
differs as it did at the end of an earlier cell has been said there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nbdist.client.metrics.checks.planting import both, rows, training
from nbdist.client.metrics.checks.rule import Rule, WatchedCell, Watcher
from nbdist.shared.text import name_ranks
from nbdist.shared.wire import BY_HAND, CELL_END, Record

MOST_OPEN = 64  # steps of which some ranks have not reported
MOST_APART = 64  # models that differ, of which ends of cells are remembered

Told = Mapping[int, Mapping[str, float]]  # by rank


class Ends(dict[str, Told]):
    """What ranks reported, at the end of a cell, of models that differed; by model."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs at a step: names, each with the ranks that agree, most ranks first.

    Ranks were last seen equal at step `equal_until`; 0 where they were not in this cell.
    `by_hand`: the loop averages gradients by itself.
    """

    names: Mapping[str, list[list[int]]]
    step: int
    equal_until: int = 0
    by_hand: bool = False


class Fingerprints(Watcher[Difference]):
    """One cell's fingerprints."""

    kinds = frozenset(("alike", "use"))

    def __init__(self, cell: WatchedCell) -> None:
        """Begin with nothing known, but of earlier cells' ends."""
        self._ranks = frozenset(cell.ranks)
        self._ends = cell.of_session.of(Ends)
        self._open: dict[tuple[str, int], dict[int, Mapping[str, float]]] = {}
        self._equal_until: dict[str, int] = {}
        self._first: dict[str, dict[int, float]] = {}  # of plain weights, before a first step

    def take(self, record: Record) -> Difference | None:
        """Take in what a rank tells of a step; return what differs, if anything does."""
        if record.kind == "use":
            self._take_use(record)
            return None
        step, prints = record.step, record.values
        model = next(iter(prints)).rpartition(":")[0]
        by_rank = self._open.setdefault((model, step), {})
        by_rank[record.rank] = prints
        if by_rank.keys() < self._ranks & _members(model, self._ranks):
            while len(self._open) > MOST_OPEN:
                del self._open[next(iter(self._open))]
            return None
        del self._open[model, step]
        by_hand = model.startswith(BY_HAND)
        if by_hand and not self._began_equal(model):
            return None
        different = _different(by_rank)
        if step == CELL_END:
            return self._at_end(model, by_rank, different)
        equal_until = self._equal_until.get(model, 0)
        if not different:
            self._equal_until[model] = max(equal_until, step)
            return None
        return Difference(different, step, equal_until, by_hand)

    def _take_use(self, record: Record) -> None:
        if record.step == 0 and "weights" in record.values:
            model = f"{BY_HAND}{record.values.get('optimizer', 0):g}"
            self._first.setdefault(model, {})[record.rank] = record.values["weights"]

    def _began_equal(self, model: str) -> bool:
        first = self._first.get(model, {})
        return first.keys() == self._ranks and len(set(first.values())) == 1

    def _at_end(
        self, model: str, by_rank: Told, different: Mapping[str, list[list[int]]]
    ) -> Difference | None:
        if len(by_rank) == 1:
            return None  # a cell of one rank compares nothing
        before = self._ends.pop(model, None)
        if not different:
            return None
        self._ends[model] = by_rank
        while len(self._ends) > MOST_APART:
            del self._ends[next(iter(self._ends))]
        return None if before == by_rank else Difference(different, CELL_END)


def _members(model: str, ranks: frozenset[int]) -> frozenset[int]:
    """Return the ranks that hold a model: those that its name tells, else all."""
    _, separator, members = model.partition("|")
    return frozenset(map(int, members.split(","))) if separator else ranks


def _different(by_rank: Told) -> dict[str, list[list[int]]]:
    """Return the names of which ranks tell different numbers, with the ranks that agree."""
    found = {}
    for name in sorted({name for prints in by_rank.values() for name in prints}):
        by_value: dict[float, list[int]] = {}
        for rank, prints in sorted(by_rank.items()):
            if name in prints:
                by_value.setdefault(prints[name], []).append(rank)
        if len(by_value) > 1:
            found[name] = sorted(by_value.values(), key=len, reverse=True)
    return found


def _sentence(found: Difference) -> str:
    names, step = list(found.names), found.step
    usual, *others = found.names[names[0]]
    unlike = sorted(rank for ranks in others for rank in ranks)
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    name = names[0].rpartition(":")[2].partition("@")[0]
    equal = f"equal until step {found.equal_until:,}"
    before = equal if found.equal_until else "from the cell's first step on"
    when = "the cell's end" if step == CELL_END else f"step {step:,} ({before})"
    said = (
        f"Replicas differ at {when}: {name}{more}, {name_ranks(unlike)} against "
        f"{name_ranks(usual)}. "
    )
    if found.by_hand:
        return said + (
            "The loop all-reduces gradients by itself, and leaves these out, or has changed them "
            'apart from that: average all of them, or let nbdist.parallelize(model, "ddp") do it.'
        )
    return said + (
        "Some ranks change weights that the others do not, or gradients are not averaged; "
        "layout.verify(batch, loss_fn) shows which."
    )


_STEP = """model(x).square().mean().backward()
{}:
    model.weight.data[0, 0] = 1.0"""

REPLICAS_DIFFER = Rule(
    "replicas-differ",
    "weights or statistics that are equal on all ranks differ",
    Fingerprints,
    _sentence,
    remedy="Change weights equally on all ranks, and those that are averaged by backward alone.",
    planted=both("alike", (5,), w=1) + rows("alike", {"w": 2}, {"w": 3}, (10,)),
    sound=both("alike", (5,), w=1) + both("alike", (10,), w=2),
    example=training(backward=_STEP.format("if rank == 1")),
    mended=training(backward=_STEP.format("if True")),
    sources=(
        "https://github.com/Lightning-AI/pytorch-lightning/issues/20340",
        "https://github.com/pytorch/pytorch/issues/12603",
    ),
)
