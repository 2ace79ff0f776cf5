"""`nbdist.mean`: a mean over what all ranks have counted, and not a mean of their means."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from nbdist.shared import side
from nbdist.shared.errors import UsageError

Numbers = float | torch.Tensor | Sequence[Any]


def mean(values: Numbers | None, counts: Numbers) -> float:
    """Return the mean of means over all ranks, each of which counts as much as it is a mean over.

        accuracy = nbdist.mean(right / seen, seen)         # of this rank's validation samples
        loss = nbdist.mean(losses, [len(y) for y in ys])   # of batches, as many as a rank has

    A mean over ranks' means is another number wherever their counts differ: a last batch, a mask,
    an uneven split. Ranks that hold the same, as those of tp do, may all give it. Collective: all
    ranks call it, with as many values as each has. Main thread.

    Args:
        values: A number, or a tensor or list of them; None where this rank has none, as without
            the last stage of a pipeline.
        counts: Over how many elements each value is a mean: one number for all, or as many as
            there are values. What has a count of 0 is left out, also where it is nan.

    Returns:
        The mean, the same on all ranks; nan where nothing was counted anywhere.

    Raises:
        UsageError: There are not as many counts as values, or one is negative or not finite.
    """
    side.require_rank("nbdist.mean")
    own = _sums([], []) if values is None else _sums(_flat(values), _flat(counts))
    every = [own]
    if dist.is_initialized():
        every = [own] * dist.get_world_size()
        dist.all_gather_object(every, own)
    total, count = (sum(column) for column in zip(*every, strict=True))
    return total / count if count else float("nan")


def _flat(numbers: Numbers) -> list[float]:
    tensor = torch.as_tensor(numbers, dtype=torch.float64).detach()
    flat: list[float] = tensor.flatten().tolist()
    return flat


def _sums(values: list[float], counts: list[float]) -> tuple[float, float]:
    """Return the sum of values times counts, and of counts."""
    if len(counts) == 1:
        counts = counts * len(values)
    if len(counts) != len(values):
        raise UsageError(
            f"nbdist.mean got {len(values)} values and {len(counts)} counts.",
            do="give a count for each value, or one for all.",
        )
    if wrong := [count for count in counts if not 0 <= count < float("inf")]:
        raise UsageError(f"nbdist.mean got {wrong[0]:g} as a count, and counts are 0 or more.")
    pairs = [(v, count) for v, count in zip(values, counts, strict=True) if count]
    return sum(v * count for v, count in pairs), sum(count for _, count in pairs)
