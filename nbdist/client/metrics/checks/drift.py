"""Notice that what ranks must hold alike differs: weights, and statistics such as batch norm's.

Ranks tell fingerprints of the same steps of a model: of a cell's second one its names begin with
"1:". Those of one name are of the same numbers, whichever rank tells them: any difference is one.
"""

from collections.abc import Mapping, Sequence

from nbdist.ranks import name_ranks

MOST_OPEN = 16  # steps of which some ranks have not told


class Drift:
    """One cell's fingerprints."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """Begin with nothing known of these ranks."""
        self._ranks = frozenset(ranks)
        self._open: dict[tuple[str, int], dict[int, Mapping[str, float]]] = {}
        self._alike_until: dict[str, int] = {}

    def take(self, rank: int, step: int, prints: Mapping[str, float]) -> str:
        """Take in what a rank tells of a step; return a sentence where ranks differ, else ""."""
        model = next(iter(prints)).rpartition(":")[0]
        told = self._open.setdefault((model, step), {})
        told[rank] = prints
        if told.keys() < self._ranks:
            while len(self._open) > MOST_OPEN:
                del self._open[next(iter(self._open))]
            return ""
        del self._open[model, step]
        different = _different(told)
        alike_until = self._alike_until.get(model, 0)
        if not different:
            self._alike_until[model] = max(alike_until, step)
            return ""
        return _sentence(different, step, alike_until)


def _different(told: Mapping[int, Mapping[str, float]]) -> dict[str, list[list[int]]]:
    """Return the names of which ranks tell different numbers, with the ranks that are alike."""
    found = {}
    for name in sorted({name for prints in told.values() for name in prints}):
        alike: dict[float, list[int]] = {}
        for rank, prints in sorted(told.items()):
            if name in prints:
                alike.setdefault(prints[name], []).append(rank)
        if len(alike) > 1:
            found[name] = sorted(alike.values(), key=len, reverse=True)
    return found


def _sentence(different: Mapping[str, list[list[int]]], step: int, alike_until: int) -> str:
    names = list(different)
    usual, *others = different[names[0]]
    unlike = sorted(rank for ranks in others for rank in ranks)
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    name = names[0].rpartition(":")[2].partition("@")[0]
    before = f"equal until step {alike_until}" if alike_until else "from the cell's first step on"
    return (
        f"Replicas differ at step {step} ({before}): {name}{more}, "
        f"{name_ranks(unlike)} against {name_ranks(usual)}. Some ranks change weights that the "
        "others do not, or gradients are not averaged; layout.verify(batch, loss_fn) shows which."
    )
