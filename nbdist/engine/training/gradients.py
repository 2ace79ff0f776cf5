"""This rank's share of the squared norm of all gradients, without a collective.

Ranks hold the same gradient (replicated) or parts of one (sharded). Each sums the squares of
its part, divided by the number of ranks that hold the same; the sum over all ranks is the
squared norm. Which ranks hold the same:

- a plain tensor: all, as under DDP; in a stage of a pipeline, those that have this stage;
- a DTensor: those along its replicated dimensions, and of each mesh as there are many.

There is no share if it needs a collective (a Partial gradient) or cannot be computed
(FSDP1's flat parameters, sparse gradients).

The share is taken when the optimizer begins, after clipping and unscaling.
"""

from collections import defaultdict
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from nbdist.engine.compat import torch_hooks, torch_pipeline


class Shares:
    """Shares of optimizers; the heap is searched once per optimizer."""

    def __init__(self) -> None:
        self._staged: WeakKeyDictionary[Any, dict[int, int]] = WeakKeyDictionary()

    @torch.no_grad()
    def of(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """Return the share of an optimizer's gradients: a scalar on their device; None: see above.

        Queues a few small kernels and waits for nothing.
        """
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        stages = self._stages(optimizer)
        equal: dict[tuple[torch.device, float], list[torch.Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                holders = holders_of(gradient, world_size // stages.get(id(parameter), 1))
                if holders is None or torch_hooks.is_flat_shard(parameter):
                    return None
                local = torch_hooks.local_part(gradient)
                equal[local.device, holders].append(local)
        squares = [
            torch.nn.utils.get_total_norm(tensors).float().square() / holders
            for (_, holders), tensors in equal.items()
        ]
        if not squares:
            return None
        share = torch.stack([square.to(squares[0].device) for square in squares]).sum()
        scale = getattr(optimizer, "grad_scale", None)  # set where a fused step unscales by itself
        return share if scale is None else share / scale.to(share).square()

    def _stages(self, optimizer: torch.optim.Optimizer) -> dict[int, int]:
        """Return, by `id`, how many times as many ranks there are as have the parameter."""
        known = self._staged.get(optimizer)
        if known is None:
            known = self._staged[optimizer] = {
                id(parameter): stage.group_size // torch_pipeline.copies_of(parameter)
                for stage in torch_pipeline.live_pipelines()[1]
                for parameter in stage.submod.parameters()
            }
        return known


def holders_of(gradient: Any, world_size: int) -> float | None:
    """Return how many of `world_size` ranks hold this one's part of a gradient.

    None where the gradient is the sum of the ranks' parts, or is sparse.
    """
    if gradient.layout != torch.strided:
        return None
    placements = getattr(gradient, "placements", None)
    if placements is None:
        return float(world_size)
    mesh = gradient.device_mesh
    holders: float = world_size / mesh.size()
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            return None
        if placement.is_replicate():
            holders *= mesh.size(dim)
    return holders
