"""Parameters that tp keeps whole: DTensors for optimizers, plain tensors while a forward runs.

A model of which some parameters are DTensors and some are not cannot be clipped, nor stepped by a
`foreach` optimizer. So all become DTensors, those that no plan cuts as replicas. Their modules go
on computing with plain tensors: a forward finds the local part in the parameter's place, as FSDP
does it, also where another module reads it (`self.position.weight`). It costs less than letting
norms dispatch as DTensors.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from nbdist.engine.compat import torch_quantized

# The module, the parameter's name, and what makes of it what the forward computes with.
Place = tuple[nn.Module, str, Callable[[Any], Any]]


def replicate_rest(
    model: nn.Module,
    mesh: DeviceMesh,
    units: list[nn.Module],
    summed: set[nn.Module],
    measured: Mapping[str, bool],
) -> None:
    """Make every plain parameter of `model` a replica over the mesh, plain in its forwards.

    Args:
        model: Its plain parameters must be equal on all ranks of the mesh.
        mesh: One-dimensional.
        units: Modules whose forward may read any parameter under them: fsdp's units, and `model`.
        summed: Modules that see a part of the features or tokens: their gradients are summed.
        measured: Whether those of a parameter are, by name, where that was measured.
    """
    made: dict[int, nn.Parameter] = {}
    places: dict[nn.Module, list[Place]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if torch_quantized.stays_whole(parameter):
                continue  # no optimizer sees it
            if id(parameter) not in made:
                whole = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
                made[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
            path = f"{prefix}.{name}" if prefix else name
            make = partial_of if measured.get(path, module in summed) else local_of
            places.setdefault(module, []).append((module, name, make))
    wrap_units(places, units, Local)


def wrap_units(
    places: dict[nn.Module, list[Place]], units: list[nn.Module], local: "type[Local]"
) -> None:
    """Have forwards find local tensors: units all that is under them, other modules their own."""
    for unit in units:
        under = [place for m in _of_unit(unit, units) for place in places.get(m, ())]
        if under:
            local(under).wrap(unit)
    for module, own in places.items():
        if module not in units:
            # Where a part of the model is called by itself.
            local(own).wrap(module)


def _of_unit(unit: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Return the modules of one unit, without those of units inside of it."""
    found = [unit]
    for child in unit.children():
        if child not in units:
            found += _of_unit(child, units)
    return found


class Local:
    """Puts local tensors in the place of replicas while a forward runs.

    Main thread, and autograd's where a checkpoint computes again. Forwards may nest: what is plain
    already is left to who made it so. Around the forward itself and not by hooks, for those do not
    run when an interrupt ends it; inside of fsdp's hooks, which gather first.
    """

    def __init__(self, places: list[Place]) -> None:
        self._places = places

    def wrap(self, module: nn.Module) -> None:
        """Have a module's forward find local tensors."""
        forward = module.forward

        @functools.wraps(forward)
        def with_local_parameters(*args: Any, **keywords: Any) -> Any:
            taken: list[tuple[nn.Module, str, nn.Parameter]] = []
            try:
                self._take(taken)
                return forward(*args, **keywords)
            finally:
                for owner, name, parameter in taken:
                    owner._parameters[name] = parameter

        module.forward = with_local_parameters

    def _take(self, taken: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
        for module, name, make in self._places:
            parameter = module._parameters[name]
            if isinstance(parameter, DTensor):
                taken.append((module, name, parameter))
                module._parameters[name] = make(parameter)


def local_of(parameter: Any) -> Any:
    """Return this rank's part; its gradient is this rank's, too."""
    return _Local.apply(parameter)  # type: ignore[no-untyped-call]


def partial_of(parameter: Any) -> Any:
    """Return the whole of a replica; its gradient is summed over the ranks."""
    summed: Any = _SumGradient.apply(parameter)  # type: ignore[no-untyped-call]
    return summed.to_local(grad_placements=[Partial()])


class _Local(torch.autograd.Function):
    """`to_local()`, whose gradient has memory of its own.

    Two parameters may be given one gradient, or a view of it, as those are that a sum adds.
    Autograd copies it where it sees that; within a DTensor it does not see it, and keeps it as both
    their `.grad`, so that a second backward would be added to each twice.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Any) -> Any:
        ctx.mesh, ctx.placements = parameter.device_mesh, parameter.placements
        ctx.shape, ctx.stride = parameter.shape, parameter.stride()
        part = parameter.to_local()
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return DTensor.from_local(
            gradient.clone(),
            ctx.mesh,
            ctx.placements,
            run_check=False,
            shape=ctx.shape,
            stride=ctx.stride,
        )


class _SumGradient(torch.autograd.Function):
    """Passes a replica on; sums its gradient over the ranks."""

    @staticmethod
    def forward(ctx: FunctionCtx, replica: Any) -> Any:
        return replica.view_as(replica)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Any) -> Any:
        return gradient.redistribute(placements=[Replicate()])
