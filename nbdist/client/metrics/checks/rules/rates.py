"""A rule on one model that ranks train with different learning rates.

What is known is the rate at an optimizer's first step in the cell, before its schedule, and that
of the steps which ranks report.
"""

import math
from collections import Counter
from collections.abc import Mapping

from nbdist.client.metrics.checks.planting import both, rows, training
from nbdist.client.metrics.checks.rule import Rule, WatchedCell, Watcher
from nbdist.shared.wire import Record

_MOST_NAMED = 4  # ranks with their rates
_MOST_OPEN = 64  # steps that some ranks have not reported


class Rates(Watcher[Mapping[int, float]]):
    """The rates of each optimizer of a spread model, by rank; ranks make them in one order."""

    kinds = frozenset(("optimizer", "use"))

    def __init__(self, cell: WatchedCell) -> None:
        """Begin with nothing known."""
        self._ranks = frozenset(cell.ranks)
        self._made: Counter[int] = Counter()
        self._open: dict[tuple[str, float, int], dict[int, float]] = {}

    def take(self, record: Record) -> Mapping[int, float] | None:
        """Take in a step of an optimizer; return its rates, once all ranks have reported it."""
        if record.values.get("parts", 0.0) < 2 or "lr" not in record.values:  # trained alone
            return None
        step = (record.kind, record.values.get("optimizer", 0.0), record.step)
        if record.kind == "optimizer":  # by which step depends on what a rank trains beside
            self._made[record.rank] += 1
            step = (record.kind, float(self._made[record.rank]), 0)
        by_rank = self._open.setdefault(step, {})
        by_rank[record.rank] = record.values["lr"]
        if by_rank.keys() < self._ranks:
            while len(self._open) > _MOST_OPEN:
                del self._open[next(iter(self._open))]
            return None
        return self._open.pop(step)


def _differs(rates: Mapping[int, float]) -> str:
    least, greatest = min(rates.values()), max(rates.values())
    if math.isclose(least, greatest, rel_tol=1e-6):
        return ""
    named = [f"{rates[rank]:g} on rank {rank}" for rank in sorted(rates)[:_MOST_NAMED]]
    more = ", ..." if len(rates) > _MOST_NAMED else ""
    return (
        f"Ranks train one model with different learning rates: {', '.join(named)}{more}. Its "
        "replicas then differ, or its parts learn at another pace; compute the rate from what all "
        "ranks share, such as the mean of their losses, and not from each one's own."
    )


_MADE = {"tensors": 4, "numbers": 100, "parts": 2}

UNEQUAL_LEARNING_RATES = Rule(
    "unequal-learning-rates",
    "ranks train one model with different learning rates",
    Rates,
    _differs,
    remedy="Compute the rate from values that are the same on all ranks.",
    planted=rows("optimizer", _MADE | {"lr": 0.1}, _MADE | {"lr": 0.2}, (0,)),
    sound=both("optimizer", (0,), lr=0.1, **_MADE),
    example=training().replace("lr=0.1", "lr=0.1 * (1 + rank)"),
    mended=training(),
    sources=(
        "https://github.com/karpathy/nanochat/pull/857",
        "https://github.com/lucidrains/DALLE-pytorch/issues/268",
        "https://github.com/rwth-i6/returnn/issues/1493",
    ),
)
