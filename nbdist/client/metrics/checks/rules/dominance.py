"""A rule on a rank whose loss is so large that an averaged step follows its samples alone.

Losses of ranks differ as their samples do, and near zero by any factor. So it is said of many steps
in a row, and only where the loss is large beside all that other ranks have had in the cell, too.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from nbdist.client.metrics.checks.planting import both, rows, training
from nbdist.client.metrics.checks.rule import Rule, WatchedCell, Watcher
from nbdist.shared.text import figure, name_ranks
from nbdist.shared.wire import Record

IN_A_ROW = 20  # steps
TIMES = 100.0  # the others' loss
LEAST = 0.1  # a smaller loss of others counts as this: near zero a ratio says nothing
KEPT = 4 * IN_A_ROW  # steps of each rank; some are heard later than others


@dataclass(frozen=True, slots=True)
class LossesInARow:
    """The newest steps of which all ranks have told, one after the other.

    Attributes:
        steps: The size of each rank's loss, by rank; of all that have one.
        last: The number of the last step.
        greatest: The greatest loss that each rank has had in the cell.
        places: The ranks with which each rank averages its gradients, as the least of them, and
            its part of their batch; of ranks that train nothing else.
    """

    steps: Sequence[Mapping[int, float]]
    last: int
    greatest: Mapping[int, float]
    places: Mapping[int, tuple[float, float]]


class Dominance(Watcher[LossesInARow]):
    """One cell's losses, while one of them is large beside the others."""

    kinds = frozenset(("step", "use"))

    def __init__(self, cell: WatchedCell) -> None:
        """Begin with nothing known."""
        self._recent = {rank: deque[tuple[int, float | None]](maxlen=KEPT) for rank in cell.ranks}
        self._greatest: dict[int, float] = {}
        self._large = dict.fromkeys(cell.ranks, 0)  # large losses of a rank in a row
        self._places: dict[int, tuple[float, float]] = {}
        self._apart: set[int] = set()  # ranks that train another model, too

    def take(self, record: Record) -> LossesInARow | None:
        """Take in a record; return the newest losses, where one has been large for long."""
        if record.kind == "use":
            self._take_use(record)
            return None
        rank, size = record.rank, record.values.get("loss")
        if size is not None:
            size = abs(size)
            if size > self._greatest.get(rank, 0.0):  # which no NaN is
                self._greatest[rank] = size
        self._recent[rank].append((record.step, size))
        # As it is of most trainings, and the rest would cost each step what all of this does.
        if size is None or not TIMES * LEAST <= size < math.inf:
            self._large[rank] = 0
            return None
        if len(self._greatest) > 1 and size < TIMES * min(self._greatest.values()):
            self._large[rank] = 0
            return None
        self._large[rank] += 1
        return self.end() if self._large[rank] >= IN_A_ROW else None

    def end(self) -> LossesInARow | None:
        """Return the newest losses, where there are enough in a row."""
        last = min((recent[-1][0] if recent else 0) for recent in self._recent.values())
        wanted = range(last - IN_A_ROW + 1, last + 1)
        heard = {rank: dict(recent) for rank, recent in self._recent.items()}
        if any(step not in of_rank for of_rank in heard.values() for step in wanted):
            return None
        found = [{rank: of_rank[step] for rank, of_rank in heard.items()} for step in wanted]
        steps = [{r: size for r, size in step.items() if size is not None} for step in found]
        places = {r: place for r, place in self._places.items() if r not in self._apart}
        return LossesInARow(steps, last, self._greatest, places)

    def _take_use(self, record: Record) -> None:
        if not record.step:
            return
        values = record.values
        place = values.get("shared_by", -1.0), values.get("part", 0.0)
        if values.get("parts", 0.0) < 2 or self._places.setdefault(record.rank, place) != place:
            self._apart.add(record.rank)


def _dominates(seen: LossesInARow) -> str:
    by_place: dict[tuple[float, float], list[int]] = {}
    for rank, place in sorted(seen.places.items()):
        if all(math.isfinite(sizes.get(rank, math.inf)) for sizes in seen.steps):
            by_place.setdefault(place, []).append(rank)
    for place, (rank, *more) in by_place.items():  # of one place they share a loss
        others = [ranks[0] for at, ranks in by_place.items() if at[0] == place[0] and at != place]
        usual = median(seen.greatest.get(other, 0.0) for other in others) if others else 0.0
        # One of 0 all along is none: of a rank that takes part for the sake of the others.
        if usual and all(TIMES * max(LEAST, usual) <= sizes[rank] for sizes in seen.steps):
            return _sentence(seen, [rank, *more], others)
    return ""


def _sentence(seen: LossesInARow, ranks: Sequence[int], others: Sequence[int]) -> str:
    now = seen.steps[-1]
    usual = median(now[other] for other in others)
    have = "the other has" if len(others) == 1 else "others have"
    return (
        f"The loss of {name_ranks(ranks)} is {figure(now[ranks[0]])} at step {seen.last:,}, where "
        f"{have} {figure(usual)}, and {TIMES:g} times theirs or more for {IN_A_ROW} steps: "
        "averaged over ranks, each step follows its samples almost alone. Compare what that rank "
        "reads with the others' (the scale of inputs and targets, a file that is broken), and "
        "whether its loss is a sum where theirs is a mean."
    )


_DATA = "torch.utils.data.TensorDataset(torch.randn(256, 4))"
_SCALED = "torch.nn.functional.l1_loss(model(x), {}).backward()"
_PARTS = {"parts": 2, "part": 0}
_AT = range(1, IN_A_ROW + 2)

ONE_RANK_DOMINATES = Rule(
    "one-rank-dominates",
    "the loss of one rank is a hundred times the others', step after step",
    Dominance,
    _dominates,
    remedy="Find out what that rank reads or computes otherwise: a step averages over all ranks, "
    "and follows the largest gradients.",
    planted=rows("use", _PARTS, _PARTS | {"part": 1}, (1,))
    + rows("step", {"loss": 0.9}, {"loss": 870.0}, _AT),
    sound=rows("use", _PARTS, _PARTS | {"part": 1}, (1,))
    + both("step", (1,), loss=2.3)
    + rows("step", {"loss": 0.001}, {"loss": 0.9}, _AT[1:]),
    example=training(data=_DATA, backward=_SCALED.format("x * 255 ** (2 * rank)")),
    mended=training(data=_DATA, backward=_SCALED.format("x")),
    sources=(
        "https://github.com/ecmwf/WeatherGenerator/issues/2724",
        "https://github.com/facebookresearch/metaseq/pull/521",
        "https://github.com/stanford-crfm/mistral/issues/115",
    ),
)
