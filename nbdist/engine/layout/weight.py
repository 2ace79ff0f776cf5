"""The weight of a rank's share of a batch: over how much its mean loss goes.

A count of samples, or of tokens that a mask keeps. Each share's gradients are multiplied with its
weight, in units of the mean share, before ranks average them: the mean of means is then that of
the whole batch, however unequal the counts. Within a pipeline micro-batches are shares likewise.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from nbdist.shared.errors import LayoutError

LossFunction = Callable[[Any, Any], torch.Tensor]
Weight = float | torch.Tensor
_TINY = torch.finfo(torch.float64).tiny  # in the place of a sum that is 0


def total_of(weight: Weight) -> float:
    """Return a weight as one number.

    Raises:
        LayoutError: It is no number from 0 on.
    """
    if isinstance(weight, torch.Tensor):
        number = float(weight.detach().sum())
    elif isinstance(weight, int | float):
        number = float(weight)
    else:
        raise LayoutError(
            f"layout.step got a {type(weight).__name__} as weight.",
            do="give a number, or a tensor that is summed: weight=(y != -100)",
        )
    if not 0 <= number < float("inf"):
        raise LayoutError(f"A weight is a number from 0 on, and this one is {number}.")
    return number


def in_units_of_the_mean(mine: float, device_type: str) -> float:
    """Return a rank's weight in units of the mean over ranks; 0 where all are. Collective."""
    total = torch.tensor([mine], dtype=torch.float64, device=device_type)
    dist.all_reduce(total)
    return mine * dist.get_world_size() / (float(total) or 1.0)


def mean_over(group: dist.ProcessGroup, loss: torch.Tensor, weight: float) -> torch.Tensor:
    """Return the mean loss of a group's ranks, each by its weight; 0 where all are. Collective."""
    both = torch.stack([loss.double() * weight, torch.full_like(loss, weight, dtype=torch.float64)])
    dist.all_reduce(both, group=group)
    return (both[0] / both[1].clamp(min=_TINY)).to(loss.dtype)


def weigh_parts(
    y: Any, loss_fn: LossFunction, weight: Weight, samples: int
) -> tuple[Any, LossFunction]:
    """Return targets and a loss function for micro-batches, each of which counts by its weight.

    Args:
        y: The targets.
        loss_fn: Makes the mean loss of a micro-batch.
        weight: With `samples` as its first dimension.
        samples: In the share.

    Raises:
        LayoutError: Which sample has which weight is not known.
    """
    if not isinstance(weight, torch.Tensor) or weight.dim() == 0 or len(weight) != samples:
        raise LayoutError(
            "With pp, layout.step needs the weight of each sample.",
            why="it weighs micro-batches, which each have some of the samples",
            do="give a tensor whose first dimension is the batch: weight=(y != -100)",
        )
    # On the CPU: a device is waited for once, and not at each micro-batch.
    of_each = weight.detach().reshape(samples, -1).sum(1).double().cpu()
    mean = float(of_each.mean()) or 1.0

    def weighed(out: Any, given: tuple[Any, torch.Tensor]) -> torch.Tensor:
        target, part = given
        return loss_of(out, target, loss_fn, float(part.sum())) * (float(part.mean()) / mean)

    return (y, of_each), weighed


def loss_of(out: Any, y: Any, loss_fn: LossFunction, weight: float | None) -> torch.Tensor:
    """Return the loss of an output; 0 where the share has no weight. None is any other.

    A mean over nothing is nan there, and so would be its gradients, whatever they are multiplied
    with.
    """
    if weight is None or weight:
        return loss_fn(out, y)
    tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
    return reduce(torch.add, [(t * 0).sum() for t in tensors if t.is_floating_point()])
