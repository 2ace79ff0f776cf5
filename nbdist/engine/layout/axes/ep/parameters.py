"""Parameters under ep: experts cut over the ranks, all else held whole by each, gradients averaged.

All are DTensors of one mesh, for an optimizer and a clipping need one kind, and plain tensors while
a forward runs (`tp/local_parameters`). A loss is a mean over a rank's samples, and that of all
ranks the mean of these. An expert has seen the tokens of all ranks of ep: its gradient is a sum
over them already, and is divided by their number. What each rank holds whole has seen its own
samples: its gradients are averaged, of a unit at once, as soon as its backward has made them.
"""

import gc
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from nbdist.engine.layout.axes.tp.local_parameters import Local, Place, local_of, wrap_units


def share_out(
    model: nn.Module, experts: Collection[nn.Module], mesh: DeviceMesh, units: list[nn.Module]
) -> None:
    """Make every parameter a DTensor, and have its gradient averaged; in place. No collective.

    Args:
        model: Its parameters are equal on all ranks of the mesh.
        experts: Modules whose parameters are cut in their first dim, into equal parts.
        mesh: The axis `ep`.
        units: Blocks, and `model`: gradients of one are averaged together.
    """
    cut = {id(p) for module in experts for p in module.parameters()}
    made: dict[int, nn.Parameter] = {}
    places: dict[nn.Module, list[Place]] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _held(parameter, mesh, is_cut=id(parameter) in cut)
            module._parameters[name] = made[id(parameter)]
            places.setdefault(module, []).append((module, name, local_of))
    wrap_units(places, units, Averaged)
    gc.collect(0)  # the whole weights, where a cycle held them


def _held(parameter: nn.Parameter, mesh: DeviceMesh, *, is_cut: bool) -> nn.Parameter:
    local, placement = parameter.detach(), Replicate() if not is_cut else Shard(0)
    if is_cut:
        local = local.chunk(mesh.size())[mesh.get_local_rank()].clone()
    held = DTensor.from_local(local, mesh, [placement], run_check=False)
    return nn.Parameter(held, requires_grad=parameter.requires_grad)


class Averaged(Local):
    """Puts local tensors in the places of DTensors while a forward runs, and averages gradients."""

    def _take(self, taken: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
        found = [(module, name, module._parameters[name]) for module, name, _ in self._places]
        held = [(m, n, p) for m, n, p in found if p is not None and isinstance(p, DTensor)]
        trained = list({id(p): p for _, _, p in held if p.requires_grad}.values())
        local = dict(zip(map(id, trained), _local(trained), strict=True))
        for module, name, parameter in held:
            taken.append((module, name, parameter))
            own: Any = local.get(id(parameter))
            module._parameters[name] = local_of(parameter) if own is None else own


def _local(trained: list[Any]) -> tuple[Tensor, ...]:
    if not trained:
        return ()
    made: tuple[Tensor, ...] = _Average.apply(*trained)  # type: ignore[no-untyped-call]
    return made


class _Average(torch.autograd.Function):
    """DTensors of one mesh become this rank's tensors; their gradients the means over its ranks."""

    @staticmethod
    def forward(ctx: Any, *held: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        local = tuple(parameter.detach().to_local() for parameter in held)
        ctx.placements = [parameter.placements for parameter in held]
        ctx.mesh, ctx.like = (
            held[0].device_mesh,
            [torch.empty_like(t, device="meta") for t in local],
        )
        return local

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[DTensor | None, ...]:
        means = list(gradients)
        is_whole = [placement.is_replicate() for (placement,) in ctx.placements]
        whole = [place for place, is_it in enumerate(is_whole) if is_it]
        for place, gradient in enumerate(gradients):
            if not is_whole[place] and gradient is not None:
                means[place] = gradient / ctx.mesh.size()
        averaged = _averaged([gradients[i] for i in whole], [ctx.like[i] for i in whole], ctx.mesh)
        for place, mean in zip(whole, averaged, strict=True):
            means[place] = mean
        return tuple(
            _as_part(mean, ctx.mesh, placements)
            for mean, placements in zip(means, ctx.placements, strict=True)
        )


def _as_part(mean: Tensor | None, mesh: DeviceMesh, placements: tuple[Placement]) -> DTensor | None:
    return None if mean is None else DTensor.from_local(mean, mesh, placements, run_check=False)


def _averaged(
    gradients: list[Tensor | None], like: list[Tensor], mesh: DeviceMesh
) -> list[Tensor | None]:
    """Return means over the ranks, in float32 or what is wider. Collective; one all_reduce.

    None where no rank has a gradient. A rank that has none, where another has one, adds zeros.
    """
    if not like:
        return []
    wide = torch.float32
    for tensor in like:
        wide = torch.promote_types(wide, tensor.dtype)
    device = mesh.device_type
    has = torch.tensor([g is not None for g in gradients], dtype=wide, device=device)
    flat = [
        torch.zeros(t.numel(), dtype=wide, device=device) if g is None else g.flatten().to(wide)
        for g, t in zip(gradients, like, strict=True)
    ]
    packed = torch.cat([*flat, has])
    dist.all_reduce(packed, group=mesh.get_group())
    *sums, had = packed.split([*(t.numel() for t in like), len(like)])
    return [
        (total / mesh.size()).view(t.shape).to(t.dtype) if is_there else None
        for total, t, is_there in zip(sums, like, had.tolist(), strict=True)
    ]


def average_bytes(model: nn.Module, mesh: DeviceMesh) -> float:
    """Return the bytes that a rank sends in one backward to average what each holds whole."""
    whole = [
        p.to_local()
        for p in model.parameters()
        if p.requires_grad and isinstance(p, DTensor) and p.placements[0].is_replicate()
    ]
    # Of each also whether this rank has a gradient.
    sent = sum((t.numel() + 1) * max(t.element_size(), torch.float32.itemsize) for t in whole)
    return 2 * (mesh.size() - 1) / mesh.size() * sent
