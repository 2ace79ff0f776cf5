"""Make tensors equal on all ranks of a group, by their mean or by one rank's: few, large calls.

Tensors of one dtype and device are laid end to end in buckets, so that a slow network carries
a few calls and not one per tensor. Main thread, all ranks of the group at once.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from nbdist.engine.layout.weights.broadcast import first_difference
from nbdist.shared.errors import LayoutError

BUCKET_BYTES = 32 << 20
_SOURCE = 0  # the rank whose weights are used


@torch.no_grad()
def average(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Put the mean over the group's ranks into each tensor."""
    n = dist.get_world_size(group)
    for bucket in _buckets(tensors):
        flat = _flat(bucket)
        dist.all_reduce(flat, group=group)
        flat /= n
        _spread(flat, bucket)


@torch.no_grad()
def broadcast(tensors: Sequence[torch.Tensor]) -> None:
    """Copy rank 0's tensors to every rank."""
    for bucket in _buckets(tensors):
        flat = _flat(bucket)
        dist.broadcast(flat.view(torch.uint8), _SOURCE)
        _spread(flat, bucket)


def check_equal(tensors: Iterable[torch.Tensor], asked: str) -> None:
    """Raise on every rank when tensors or arguments differ between ranks.

    Without this, the first collective of another size ends the process inside gloo.

    Raises:
        LayoutError: With the first rank that differs.
    """
    given = list(tensors)
    table = [("asked", asked), *((str(tuple(t.shape)), str(t.dtype)) for t in given)]
    found = first_difference(table, given[0].device.type if given else "cpu")
    if found is None:
        return
    other, here, there = found
    if here[0] != there[0]:
        raise LayoutError(
            f"Rank {_SOURCE} asks for {here[0][1]}, rank {other} for {there[0][1]}.",
            do="make the same call on every rank",
        )
    raise LayoutError(
        f"Ranks {_SOURCE} and {other} have different models in {asked}.",
        why="every rank trains a copy of one and the same model",
        do="build the model on every rank from the same code and sizes",
    )


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Return the tensors in groups of one dtype and device, none of them above BUCKET_BYTES."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for same in kinds.values():
        bucket: list[torch.Tensor] = []
        size = 0
        for tensor in same:
            if bucket and size + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def _flat(bucket: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in bucket])


def _spread(flat: torch.Tensor, bucket: list[torch.Tensor]) -> None:
    parts = flat.split([tensor.numel() for tensor in bucket])
    torch._foreach_copy_(bucket, [p.view(t.shape) for p, t in zip(parts, bucket, strict=True)])
