"""Exchanges between ranks of cp, with autograd: parts of a sequence, and heads for parts.

Gradients of ranks are averaged over cp, and the code outside the blocks runs equally on all of
them. So the gradients of a block's parameters on one rank must count as many times as there are
ranks, and gradients that leave the blocks must be whole again:

            forward                backward
    cut     own part               all parts, / ranks     before the first block
    gather  all parts              own part, x ranks      after the last one
    a2a     heads for parts        parts for heads        around attention (Ulysses)
    collect all parts              their sum, own part    of keys and values

Collective, all of them, on the thread that runs forward or backward.
"""

# N ranks of cp, t tokens of one rank, T = N t of all, h heads of one rank, H = N h

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from nbdist.engine.compat.groups import torch_groups


def own_part(whole: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part, a view; its gradient stays this rank's."""
    size = whole.shape[dim] // mesh.size()
    return whole.narrow(dim, mesh.get_local_rank() * size, size)


def cut(whole: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of a tensor that is equal on all ranks."""
    part: Tensor = _Cut.apply(whole, dim, mesh)  # type: ignore[no-untyped-call]
    return part


def gather(part: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Return the whole, with which all ranks compute the same."""
    whole: Tensor = _Gather.apply(part, dim, mesh)  # type: ignore[no-untyped-call]
    return whole


def collect(parts: list[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    """Return the whole of each tensor (..., t, features), on which ranks compute differently.

    One collective where they have one dtype.
    """
    if len({part.dtype for part in parts}) > 1:
        return [whole for part in parts for whole in collect([part], mesh)]
    packed = torch.cat([part.flatten() for part in parts])
    everyone: Tensor = _Collect.apply(packed, mesh)  # type: ignore[no-untyped-call]
    sizes = [part.numel() for part in parts]
    return [
        _one_after_another(of_ranks.unflatten(1, part.shape), -2)
        for of_ranks, part in zip(everyone.split(sizes, dim=1), parts, strict=True)
    ]


def heads_for_parts(parts: list[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    """Return of tensors (..., H, t, features) this rank's (..., h, T, features).

    One collective where they have one dtype.
    """
    if len({part.dtype for part in parts}) > 1:
        return [heads for part in parts for heads in heads_for_parts([part], mesh)]
    n = mesh.size()
    # One row for each rank: its heads of all tensors.
    split = [part.unflatten(-3, (n, -1)).movedim(-4, 0) for part in parts]
    rows = _swap(torch.cat([one.flatten(1) for one in split], dim=1), mesh)
    sizes = [one[0].numel() for one in split]
    return [
        _one_after_another(of_ranks.unflatten(1, one.shape[1:]), -2)
        for of_ranks, one in zip(rows.split(sizes, dim=1), split, strict=True)
    ]


def parts_for_heads(heads: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return of (..., h, T, features) this rank's (..., H, t, features)."""
    of_ranks = heads.unflatten(-2, (mesh.size(), -1)).movedim(-3, 0)
    return _one_after_another(_swap(of_ranks, mesh), -3)


def _swap(rows: Tensor, mesh: DeviceMesh) -> Tensor:
    swapped: Tensor = _Swap.apply(rows, mesh)  # type: ignore[no-untyped-call]
    return swapped


def _one_after_another(of_ranks: Tensor, dim: int) -> Tensor:
    """Return tensors (N, ...) as one, joined in `dim`, counted from the end."""
    return of_ranks.movedim(0, dim - 1).flatten(dim - 1, dim)


def _all_parts(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return (N, ...): the parts of all ranks."""
    mine = part.contiguous()
    if mine.dtype is torch.bool:  # gloo sends none
        return _all_parts(mine.view(torch.uint8), mesh).view(torch.bool)
    everyone = mine.new_empty((mesh.size(), *mine.shape))
    torch_groups.all_gather_single(everyone.view(-1), mine.view(-1), group=mesh.get_group())
    return everyone


def _joined(part: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    return _one_after_another(_all_parts(part, mesh), dim % part.dim() - part.dim()).contiguous()


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
        ctx.dim, ctx.mesh = dim, mesh
        return own_part(whole, dim, mesh).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _joined(gradient, ctx.dim, ctx.mesh).div_(ctx.mesh.size()), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
        ctx.dim, ctx.mesh = dim, mesh
        return _joined(part, dim, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return own_part(gradient, ctx.dim, ctx.mesh) * ctx.mesh.size(), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return _all_parts(part, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        mine = gradient.new_empty(gradient.shape[1:])
        torch_groups.reduce_scatter_single(
            mine.view(-1), gradient.contiguous().view(-1), group=ctx.mesh.get_group()
        )
        return mine, None


class _Swap(torch.autograd.Function):
    """Row i of rank j becomes row j of rank i."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return _swapped(rows, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _swapped(gradient, ctx.mesh), None


def _swapped(rows: Tensor, mesh: DeviceMesh) -> Tensor:
    mine = rows.contiguous()
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=mesh.get_group())
    return theirs


def context_bytes(
    method: str,
    hidden: float,
    attended: Sequence[tuple[float, float, float]],
    *,
    cp: int,
    backend: str,
    loss: bool,
    before: float = 0.0,
) -> float:
    """Return the bytes a rank sends over cp for each token of its batch, forward and backward.

    Args:
        method: "ulysses" swaps queries, keys, values and the result, each way once in forward and
            once in backward; "gather" all-gathers keys and values, and reduce-scatters their
            gradients (on gloo an all-reduce).
        hidden: Bytes of one token's hidden state. Its gradient is gathered before the first block;
            itself after the last one, without `loss`.
        attended: By call of attention, bytes of one token's query, of its key with its value, and
            of its result.
        cp: Ranks that share a sequence.
        backend: "gloo" or "nccl".
        loss: Whether norm, head and loss work on parts, too.
        before: Bytes that are gathered beside: of an encoder, whose outputs each block of a decoder
            cuts.
    """
    others = (cp - 1) / cp
    ends = others * (hidden * (1 if loss else 2) + before)
    if method == "ulysses":
        return ends + others * 2 * sum(map(sum, attended)) / cp
    return ends + others * sum(both for _, both, _ in attended) * (3 if backend == "gloo" else 2)
