"""A rule on a batch that grew and a learning rate that did not follow.

What can be seen: how many samples each rank took for a step, how many parts of a batch there are,
and the rate. A batch is only compared with earlier ones of the same model in this kernel, or with
the one that `nbdist.scale_lr` was given: of the first training it is not known for which batch its
rate was found, and so nothing is said.
"""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from nbdist.client.metrics.checks.planting import both, training
from nbdist.client.metrics.checks.rule import Rule, WatchedCell, Watcher
from nbdist.shared.wire import Record

GROWTH = 1.5  # less is the remainder that joins a batch, or the last one of an epoch
FIRST_STEPS = 3  # by which a cell's batch is known
_MOST_CELLS = 500


@dataclass(frozen=True, slots=True)
class Trained:
    """What one cell trained, and how.

    Attributes:
        model: How many parameters and how many elements its optimizer has: the same in the next
            cell, whatever names have changed.
        lr: The learning rate.
        batch: Samples in a step, over all ranks.
        parts: Ranks that differ in their samples.
        scaled_for: The batch that `nbdist.scale_lr` was told; None if it was not called.
    """

    model: tuple[int, int]
    lr: float
    batch: int
    parts: int
    scaled_for: int | None = None

    @property
    def split(self) -> str:
        """The batch as a product, for people."""
        ranks = "1 rank" if self.parts == 1 else f"{self.parts} ranks"
        return f"{ranks} x {self.batch / self.parts:g}"


def advice(now: Trained, before: Sequence[Trained]) -> str:
    """Return one sentence if the learning rate did not follow the batch, else nothing.

    Args:
        now: The newest training.
        before: The earlier ones of this kernel, the newest last.
    """
    same = [one for one in before if one.model == now.model]
    if now.scaled_for is not None:
        known = any((one.batch, one.scaled_for) == (now.batch, now.scaled_for) for one in same)
        return "" if known or now.batch < GROWTH * now.scaled_for else _scaled_for_less(now)
    if not same or now.batch < GROWTH * max(one.batch for one in same):
        return ""  # a batch as large was tried before, and what was to say of it was said
    last = same[-1]
    return _did_not_follow(now, last) if math.isclose(now.lr, last.lr, rel_tol=1e-6) else ""


def _scaled_for_less(now: Trained) -> str:
    return (
        f"nbdist.scale_lr scaled the learning rate for batches of {now.scaled_for} samples, and a "
        f"step takes {now.batch} ({now.split}): pass it global_batch={now.batch}, or keep the "
        f"batch by nbdist.loader(dataset, global_batch={now.scaled_for})."
    )


def _did_not_follow(now: Trained, last: Trained) -> str:
    return (
        f"The batch grew from {last.batch} to {now.batch} samples per step ({now.split}, before "
        f"{last.split}) and the learning rate is still {now.lr:g}, so an epoch makes "
        f"{now.batch / last.batch:.3g} x fewer steps of the same length: nbdist.scale_lr("
        f"optimizer, global_batch={now.batch}, reference_batch={last.batch}) scales the rate, "
        f"nbdist.loader(dataset, global_batch={last.batch}) keeps the batch on any number of ranks."
    )


class Trainings(deque[Trained]):
    """What the kernel's cells have trained, the newest last: more ranks often come with a start."""

    def __init__(self) -> None:
        super().__init__(maxlen=_MOST_CELLS)


class Batches(Watcher[tuple[Trained, Sequence[Trained]]]):
    """What one cell trains with, and what earlier ones have."""

    kinds = frozenset(("optimizer", "step"))

    def __init__(self, cell: WatchedCell) -> None:
        """Begin with nothing known."""
        self._ranks = cell.ranks
        # The values of a sweep are varied on purpose.
        self._is_quiet = cell.is_of_sweep
        self._before = cell.of_kernel.of(Trainings)
        self._optimizer: dict[str, float] | None = None
        self._samples: defaultdict[int, dict[int, float]] = defaultdict(dict)  # by step and rank
        self._is_known = False

    def take(self, record: Record) -> tuple[Trained, Sequence[Trained]] | None:
        """Remember what the first steps tell; return it once that is enough."""
        if self._is_known:
            return None
        if record.kind == "optimizer" and record.rank == self._ranks[0]:
            self._optimizer = self._optimizer or record.values
        elif record.kind == "step" and record.step <= FIRST_STEPS:
            self._samples[record.step][record.rank] = record.values.get("samples", 0.0)
            return self._known(FIRST_STEPS)
        return None

    def end(self) -> tuple[Trained, Sequence[Trained]] | None:
        """Return what is known of a short cell."""
        return None if self._is_known else self._known(1)

    def _known(self, enough: int) -> tuple[Trained, Sequence[Trained]] | None:
        whole = [s for s in self._samples.values() if len(s) == len(self._ranks)]
        if len(whole) < enough:
            return None
        self._is_known = True
        trained = self._trained(whole)
        if trained is None:
            return None
        before = tuple(self._before)
        self._before.append(trained)
        return None if self._is_quiet else (trained, before)

    def _trained(self, steps: Sequence[dict[int, float]]) -> Trained | None:
        """Return what is known; None where it cannot be known what a step took."""
        values = self._optimizer
        if values is None:
            return None
        # Of plain models on many ranks it is not seen whether the program averages what they learn.
        parts = int(values.get("parts", 1 if len(self._ranks) == 1 else 0))
        taken = [[n for n in samples.values() if n] for samples in steps]
        batches = [mean(samples) * parts for samples in taken if samples]
        if not parts or not batches:
            return None
        model = int(values["tensors"]), int(values["numbers"])
        batch = values.get("scaled_for")
        return Trained(
            model,
            values["lr"],
            round(median(batches)),
            parts,
            None if batch is None else int(batch),
        )


_TAKEN = both("step", (1, 2, 3), samples=64)
_MADE = {"lr": 0.1, "tensors": 4, "numbers": 100, "parts": 2}
_LOOP = training(loader="nbdist.loader(data, global_batch=16)")
_SCALE = "nbdist.scale_lr(optimizer, global_batch={}, reference_batch=4)\nfor"

UNSCALED_LEARNING_RATE = Rule(
    "unscaled-learning-rate",
    "the batch grew, and the learning rate did not follow",
    Batches,
    lambda trainings: advice(*trainings),
    remedy="Scale the rate with nbdist.scale_lr, or keep the batch with global_batch=.",
    planted=both("optimizer", (0,), scaled_for=32, **_MADE) + _TAKEN,
    sound=both("optimizer", (0,), scaled_for=128, **_MADE) + _TAKEN,
    example=_LOOP.replace("for", _SCALE.format(8)),
    mended=_LOOP.replace("for", _SCALE.format(16)),
    sources=(
        "https://github.com/Lightning-AI/pytorch-lightning/issues/3706",
        "https://arxiv.org/abs/1706.02677",
    ),
)
