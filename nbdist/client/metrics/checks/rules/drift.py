"""Notice that what must be equal on all ranks differs: weights, and batch norm's statistics.

Ranks tell fingerprints of the same steps of a model: of a cell's second one its names begin with
"1:". Those of one name are of the same numbers, whichever rank tells them: any difference is one.

At a cell's end they tell of all models that are alive, whether the cell has used them or not. What
differs as it did at the end of an earlier cell has been said there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nbdist.client.metrics.checks.planting import both, rows, training
from nbdist.client.metrics.checks.rule import Rule, WatchedCell, Watcher
from nbdist.shared.text import name_ranks
from nbdist.shared.wire import CELL_END, Record

MOST_OPEN = 64  # steps of which some ranks have not reported
MOST_APART = 64  # models that differ, of which ends of cells are remembered

Told = Mapping[int, Mapping[str, float]]  # by rank


class Ends(dict[str, Told]):
    """What ranks reported, at the end of a cell, of models that differed; by model."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs at a step: names, each with the ranks that agree, most ranks first.

    Ranks were last seen equal at step `equal_until`; 0 where they were not in this cell.
    """

    names: Mapping[str, list[list[int]]]
    step: int
    equal_until: int = 0


class Fingerprints(Watcher[Difference]):
    """One cell's fingerprints."""

    kinds = frozenset(("alike",))

    def __init__(self, cell: WatchedCell) -> None:
        """Begin with nothing known, but of earlier cells' ends."""
        self._ranks = frozenset(cell.ranks)
        self._ends = cell.of_session.of(Ends)
        self._open: dict[tuple[str, int], dict[int, Mapping[str, float]]] = {}
        self._equal_until: dict[str, int] = {}

    def take(self, record: Record) -> Difference | None:
        """Take in what a rank tells of a step; return what differs, if anything does."""
        step, prints = record.step, record.values
        model = next(iter(prints)).rpartition(":")[0]
        by_rank = self._open.setdefault((model, step), {})
        by_rank[record.rank] = prints
        if by_rank.keys() < self._ranks & _members(model, self._ranks):
            while len(self._open) > MOST_OPEN:
                del self._open[next(iter(self._open))]
            return None
        del self._open[model, step]
        different = _different(by_rank)
        if step == CELL_END:
            return self._at_end(model, by_rank, different)
        equal_until = self._equal_until.get(model, 0)
        if not different:
            self._equal_until[model] = max(equal_until, step)
            return None
        return Difference(different, step, equal_until)

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
    return (
        f"Replicas differ at {when}: {name}{more}, "
        f"{name_ranks(unlike)} against {name_ranks(usual)}. Some ranks change weights that the "
        "others do not, or gradients are not averaged; layout.verify(batch, loss_fn) shows which."
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
