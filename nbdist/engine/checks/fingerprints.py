"""Fingerprints of replicated tensors: parameters and buffers of layouts.

Each tensor's name includes which of its parts this rank has: ranks with the same name and part
hold the same numbers, bit for bit, at every end of a step.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nbdist.engine.compat import torch_sharded
from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.weights.buffers import replicated_buffers


def replicated(layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield (name and part, this rank's plain tensor) of what a layout keeps equal on ranks."""
    yield from replicated_parameters(layout)
    yield from replicated_buffers(layout.model)


def replicated_parameters(layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield what `replicated` does, of parameters, trained or not.

    Tensors without the same part on another rank are left out.
    """
    # A forward without a backward (of a GAN) leaves a model of fsdp gathered: what its modules have
    # then are not the shards, and their memory may be freed at any time.
    shards = {id(whole): shard for shard, whole in torch_sharded.gathered(layout.model)}
    for name, held in layout.model.named_parameters():
        parameter = shards.get(id(held), held)
        if isinstance(parameter, DTensor):
            part, copies = _part_of(parameter)
            if copies > 1:
                yield name + part, parameter.to_local()
        else:
            yield name, parameter


def _part_of(parameter: DTensor) -> tuple[str, int]:
    """Return which part of a parameter this rank has, "" for all, and how many ranks have it."""
    mesh = parameter.device_mesh
    part, copies = "", 1
    for dim, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            part += f"@{dim}.{mesh.get_local_rank(dim)}"
        else:
            copies *= mesh.size(dim)
    return part, copies


MOST_NUMBERS = 1000  # of one model: with more tensors, neighbours share one
SELECTION = 1 << 20  # elements of one tensor that are read: some 0.2 ms on a CPU
_DIGITS = 52  # bits that a float of the wire holds exactly
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Return one int64 per tensor, on the tensors' device.

    Args:
        tensors: Plain and not empty, all on one device.
    """
    return torch.stack([_sum_of_bits(tensor.detach()) for tensor in tensors])


def fingerprints_by_name(held: Sequence[tuple[str, Tensor]]) -> dict[str, float]:
    """Return a fingerprint by name; of very many tensors, one for a few neighbours each."""
    names, tensors = zip(*held, strict=True)
    together = -(-len(held) // MOST_NUMBERS)
    prints = iter(fingerprints(tensors).tolist())
    return {name: as_float(sum(islice(prints, together))) for name in names[::together]}


def as_float(fingerprint: int) -> float:
    """Return a fingerprint as a float that holds it exactly; its highest bits count, too."""
    return float((fingerprint ^ fingerprint >> _DIGITS) & ((1 << _DIGITS) - 1))


def _sum_of_bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.reshape(-1)
    if flat.numel() > SELECTION:
        flat = flat[:: -(-flat.numel() // SELECTION)].contiguous()
    # A NaN is one value, of whatever bits. On a CPU a sum shows more cheaply whether there is one.
    may_have_nans = flat.is_floating_point() and flat.element_size() > 1
    if may_have_nans and (flat.is_cuda or flat.sum().isnan()):
        flat = flat.masked_fill(flat.isnan(), torch.nan)
    size = flat.element_size()
    if size == 4 and flat.numel() % 2 == 0:  # by the number alone, which is the same on all ranks
        # Two at a time: a CPU sums int64 as they are, and widens int32 one by one, 5 times as slow.
        size = 8
        if flat.storage_offset() % 2:
            flat = flat.clone()
    return flat.view(_WHOLE[size]).sum(dtype=torch.int64)
