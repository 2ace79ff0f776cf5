"""Average gradients over ranks when all backwards are done, for what no reducer hooks onto.

A pipeline's schedule makes many backwards a step, some of them in two halves; DDP's reducer counts
them, and would send in each. So gradients are averaged once, behind the last.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.compat.torch_hooks import local_part
from nbdist.engine.layout.plan import numbers

BUCKET_BYTES = 25 << 20  # as DDP's


@torch.no_grad()
def average(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype | None = None
) -> None:
    """Make every gradient the mean over the group. Collective.

    A parameter that has a gradient on some ranks only gets the mean with zeros on all of them; one
    that has none anywhere keeps none.

    Args:
        parameters: The same on all ranks.
        group: Who averages.
        dtype: In what gradients are sent and added up; None: as they are.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return
    device = trained[0].device
    here = [p.grad is not None for p in trained]
    has_gradient = torch.tensor(here, dtype=torch.uint8).to(device)
    dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group)
    anywhere = has_gradient.tolist() if numbers.are_here() else here
    used = [p for p, has in zip(trained, anywhere, strict=True) if has]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    count = dist.get_world_size(group)
    for bucket in _buckets([local_part(p.grad) for p in used if p.grad is not None]):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(count)
        sent = flat.to(dtype or flat.dtype)
        dist.all_reduce(sent, group=group)
        for gradient, mean in zip(bucket, sent.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield runs of gradients of one dtype, of a bucket's size."""
    bucket: list[torch.Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (gradient.dtype != bucket[0].dtype or size + gradient.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
