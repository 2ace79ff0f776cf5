"""A rule on optimizers that a cell has gradients for, and never lets step."""

from collections.abc import Mapping

from nbdist.client.metrics.checks.planting import DDP, both, training
from nbdist.client.metrics.checks.rule import Rule, WatchedCell, Watcher
from nbdist.client.metrics.checks.uses import ENOUGH
from nbdist.shared.text import name_ranks
from nbdist.shared.wire import CELL_END, Record


class Left(Watcher[Mapping[int, float]]):
    """The backwards after which no optimizer has stepped in the cell, by rank."""

    kinds = frozenset(("left",))

    def __init__(self, cell: WatchedCell) -> None:
        """Begin with nothing known."""
        self._backwards: dict[int, float] = {}

    def take(self, record: Record) -> None:
        """Take in what a rank tells at the cell's end."""
        if "backwards" in record.values:
            self._backwards[record.rank] = record.values["backwards"]

    def end(self) -> Mapping[int, float] | None:
        """Return what all ranks have told."""
        return self._backwards or None


def _never_steps(backwards: Mapping[int, float]) -> str:
    ranks = sorted(rank for rank, count in backwards.items() if count >= ENOUGH)
    if not ranks:
        return ""
    return (
        f"No optimizer has stepped in this cell: after {int(backwards[ranks[0]]):,} backwards the "
        f"weights of {name_ranks(ranks)} are as they were. Call optimizer.step() after "
        "loss.backward(), with a GradScaler scaler.step(optimizer)."
    )


_STEP = "    optimizer.step()\n"
_MENDED = training(DDP)

FORGOTTEN_STEP = Rule(
    "forgotten-step",
    "gradients are computed, and the optimizer never steps",
    Left,
    _never_steps,
    remedy="Call optimizer.step() after loss.backward().",
    planted=both("left", (CELL_END,), backwards=8),
    sound=both("left", (CELL_END,), backwards=1),
    example=_MENDED.replace(_STEP, ""),
    mended=_MENDED,
    sources=(
        "https://github.com/tedlasai/learn2refocus/issues/5",
        "https://github.com/zhaoyuzhi/deepfillv2/issues/6",
    ),
)
