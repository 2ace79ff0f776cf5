"""Parameters under ep: experts cut over the ranks, all else held whole by each, gradients averaged.

All are DTensors of one mesh, for an optimizer and a clipping need one kind, and plain tensors while
a forward runs (`tp/local_parameters`). A loss is a mean over a rank's samples, and that of all
ranks the mean of these. An expert has seen the tokens of all ranks of ep: its gradient is a sum
over them already, and is divided by their number. What each rank holds whole has seen its own
samples: its gradients are averaged, of a unit at once, as soon as its backward has made them.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from nbdist.engine.compat import torch_hooks
from nbdist.engine.layout.axes.tp.local_parameters import Local, Place, local_of, wrap_units
from nbdist.engine.layout.plan import numbers


def share_out(
    model: nn.Module, cut: Mapping[int, int], mesh: DeviceMesh, units: list[nn.Module]
) -> None:
    """Make every parameter a DTensor, and have its gradient averaged; in place. No collective.

    Args:
        model: Its parameters are equal on all ranks of the mesh.
        cut: In which dim the parameters of experts are cut into equal parts, by their `id`.
        mesh: The axis `ep`; beside tp, which has made DTensors of all, `ep` and `tp`.
        units: Blocks, and `model`: gradients of one are averaged together.
    """
    made: dict[int, nn.Parameter] = {}
    places: dict[nn.Module, list[Place]] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _held(parameter, mesh, cut.get(id(parameter)))
            module._parameters[name] = made[id(parameter)]
            places.setdefault(module, []).append((module, name, local_of))
    wrap_units(places, units, Averaged)
    gc.collect(0)  # the whole weights, where a cycle held them


def _held(parameter: nn.Parameter, mesh: DeviceMesh, dim: int | None) -> nn.Parameter:
    whole: Any = parameter.detach()
    local = whole.to_local() if isinstance(whole, DTensor) else whole
    of_tp = whole.placements if isinstance(whole, DTensor) else ()
    if dim is not None:
        local = local.chunk(mesh.size(0), dim)[mesh.get_local_rank(0)].clone()
    placement = Replicate() if dim is None else Shard(dim)
    form = _Form((placement, *of_tp), whole.shape, whole.stride())
    return nn.Parameter(form.of(local, mesh), requires_grad=parameter.requires_grad)


@dataclass(frozen=True, slots=True)
class _Form:
    """How a DTensor lies on a mesh: over ep, and beside it over tp."""

    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def like(cls, held: Any) -> "_Form":
        return cls(held.placements, held.shape, held.stride())

    @property
    def is_whole(self) -> bool:
        """Whether all ranks of ep hold the same."""
        return self.placements[0].is_replicate()

    def of(self, local: Tensor, mesh: DeviceMesh) -> DTensor:
        """Return the DTensor of which `local` is this rank's part."""
        return DTensor.from_local(
            local, mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def without_ep(self, local: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return what a forward computes with: `local`, beside tp as a DTensor of that axis."""
        if mesh.ndim == 1:
            return local
        first, *rest = self.shape
        shape = self.shape if self.is_whole else torch.Size([first // mesh.size(0), *rest])
        return _Form(self.placements[1:], shape, self.stride).of(local, mesh["tp"])

    def part_of(self, gradient: Any) -> Tensor | None:
        """Return this rank's part of a gradient of what `without_ep` has returned."""
        if isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=self.placements[1:]).to_local()
        part: Tensor | None = gradient
        return part


class Averaged(Local):
    """Puts what ranks of ep hold in the places of DTensors in a forward; averages gradients."""

    def _take(self, taken: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
        found = [(module, name, module._parameters[name]) for module, name, _ in self._places]
        held = [(m, n, p) for m, n, p in found if p is not None and _is_held(p)]
        each = list({id(p): p for _, _, p in held}.values())
        is_learning = torch.is_grad_enabled()
        trained = [p for p in each if p.requires_grad and is_learning]
        local = dict(zip(map(id, trained), _local(trained), strict=True))
        others = [p for p in each if not (p.requires_grad and is_learning)]
        local |= zip(map(id, others), _without_ep(others), strict=True)
        for module, name, parameter in held:
            taken.append((module, name, parameter))
            module._parameters[name] = local[id(parameter)]  # type: ignore[assignment]


def _is_held(parameter: Any) -> bool:
    """Return whether ep holds a parameter: beside tp it is one of that axis in a forward."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names
    return names is not None and names[0] == "ep"


def _local(trained: list[Any]) -> tuple[Tensor, ...]:
    if not torch.is_grad_enabled():
        return tuple(torch_hooks.local_part(parameter) for parameter in trained)
    if not trained:
        return ()
    made: tuple[Tensor, ...] = _Average.apply(*trained)  # type: ignore[no-untyped-call]
    return made


def _without_ep(held: Sequence[Any]) -> tuple[Tensor, ...]:
    return tuple(_Form.like(p).without_ep(torch_hooks.local_part(p), p.device_mesh) for p in held)


class _Average(torch.autograd.Function):
    """DTensors of one mesh become what forwards take; their gradients the means over ep."""

    @staticmethod
    def forward(ctx: Any, *held: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.forms, ctx.mesh = list(map(_Form.like, held)), held[0].device_mesh
        ctx.like = [torch.empty_like(p.detach().to_local(), device="meta") for p in held]
        return _without_ep(held)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[DTensor | None, ...]:
        forms, mesh = ctx.forms, ctx.mesh
        means = [form.part_of(given) for form, given in zip(forms, gradients, strict=True)]
        whole = [place for place, form in enumerate(forms) if form.is_whole]
        averaged = _averaged([means[i] for i in whole], [ctx.like[i] for i in whole], mesh)
        for place, mean in enumerate(means):
            if not forms[place].is_whole and mean is not None:
                means[place] = mean / mesh.size(0)
        for place, mean in zip(whole, averaged, strict=True):
            means[place] = mean
        return tuple(
            None if mean is None else form.of(mean, mesh)
            for mean, form in zip(means, forms, strict=True)
        )


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
    dist.all_reduce(packed, group=mesh.get_group(0))
    *sums, had = packed.split([*(t.numel() for t in like), len(like)])
    there = had.tolist() if numbers.are_here() else [g is not None for g in gradients]
    return [
        (total / mesh.size(0)).view(t.shape).to(t.dtype) if is_there else None
        for total, t, is_there in zip(sums, like, there, strict=True)
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
    return 2 * (mesh.size(0) - 1) / mesh.size(0) * sent
