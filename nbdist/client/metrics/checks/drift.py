"""Notice that what must be equal on all ranks differs: weights, and batch norm's statistics.

Ranks tell fingerprints of the same steps of a model: of a cell's second one its names begin with
"1:". Those of one name are of the same numbers, whichever rank tells them: any difference is one.

At a cell's end they tell of all models that are alive, whether the cell has used them or not. What
differs as it did at the end of an earlier cell has been said there.
"""

from collections.abc import Mapping, MutableMapping, Sequence

from nbdist.shared.text import name_ranks
from nbdist.shared.wire import CELL_END

MOST_OPEN = 64  # steps of which some ranks have not reported
MOST_APART = 64  # models that differ, of which ends of cells are remembered

Told = Mapping[int, Mapping[str, float]]  # by rank
Ends = MutableMapping[str, Told]  # what ranks reported of models that differed, by model


class Drift:
    """One cell's fingerprints."""

    def __init__(self, ranks: Sequence[int], ends: Ends | None = None) -> None:
        """Begin with nothing known of these ranks, but of earlier cells' ends."""
        self._ranks = frozenset(ranks)
        self._ends = {} if ends is None else ends
        self._open: dict[tuple[str, int], dict[int, Mapping[str, float]]] = {}
        self._alike_until: dict[str, int] = {}

    def take(self, rank: int, step: int, prints: Mapping[str, float]) -> str:
        """Take in what a rank tells of a step; return a sentence where ranks differ, else ""."""
        model = next(iter(prints)).rpartition(":")[0]
        by_rank = self._open.setdefault((model, step), {})
        by_rank[rank] = prints
        if by_rank.keys() < self._ranks & _members(model, self._ranks):
            while len(self._open) > MOST_OPEN:
                del self._open[next(iter(self._open))]
            return ""
        del self._open[model, step]
        different = _different(by_rank)
        if step == CELL_END:
            return self._at_end(model, by_rank, different)
        alike_until = self._alike_until.get(model, 0)
        if not different:
            self._alike_until[model] = max(alike_until, step)
            return ""
        return _sentence(different, step, alike_until)

    def _at_end(self, model: str, by_rank: Told, different: Mapping[str, list[list[int]]]) -> str:
        if len(by_rank) == 1:
            return ""  # a cell of one rank compares nothing
        before = self._ends.pop(model, None)
        if not different:
            return ""
        self._ends[model] = by_rank
        while len(self._ends) > MOST_APART:
            del self._ends[next(iter(self._ends))]
        return "" if before == by_rank else _sentence(different, CELL_END, 0)


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


def _sentence(different: Mapping[str, list[list[int]]], step: int, alike_until: int) -> str:
    names = list(different)
    usual, *others = different[names[0]]
    unlike = sorted(rank for ranks in others for rank in ranks)
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    name = names[0].rpartition(":")[2].partition("@")[0]
    before = f"equal until step {alike_until}" if alike_until else "from the cell's first step on"
    when = "the cell's end" if step == CELL_END else f"step {step} ({before})"
    return (
        f"Replicas differ at {when}: {name}{more}, "
        f"{name_ranks(unlike)} against {name_ranks(usual)}. Some ranks change weights that the "
        "others do not, or gradients are not averaged; layout.verify(batch, loss_fn) shows which."
    )
