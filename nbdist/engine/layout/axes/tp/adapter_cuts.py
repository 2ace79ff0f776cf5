"""Cut a layer together with the adapters on it: as one column, or one row.

    column  x ─▶ (its gradient is summed) ─▶ layer, adapters: parts of the outputs
    row     parts of x ─▶ layer, adapters: addends ─▶ (summed) ─▶ outputs

Between the ends a rank computes with plain tensors: its parts of what is cut, and the whole of
the rest, whose gradients are summed. So an adapter sends nothing beside what its layer sends,
but gradients of what it has whole: `lora_A` of a column, `lora_B` of a row. What PEFT, or a class
of the user's, computes in between has no matter, as long as a forward proves it (`proof`).
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from nbdist.engine.layout.axes.tp.cuts import COLUMN, ROW, added_once, cut_dims
from nbdist.engine.layout.axes.tp.local_parameters import Local, Place, local_of, partial_of
from nbdist.engine.layout.plan.adapted import layer_in
from nbdist.shared.errors import LayoutError


def is_cut_here(module: nn.Module, style: Any) -> bool:
    """Return whether a cut is of a layer with an adapter, so that torch's styles cannot make it."""
    return style in (COLUMN, ROW) and layer_in(module) is not None


def apply(module: nn.Module, style: Any, mesh: DeviceMesh, *, scatters: bool) -> None:
    """Cut a layer and its adapters, in place.

    Args:
        module: The wrapper around the layer, with the same numbers on every rank.
        style: "column" or "row".
        mesh: The axis `tp`.
        scatters: With sequence parallel: a row's outputs are parts of the sequence.
    """
    dims, shared = cut_dims(style, module), set(added_once(style, module))
    places: list[Place] = []
    for prefix, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            path = f"{prefix}.{name}" if prefix else name
            placement = Shard(dims[path]) if path in dims else Replicate()
            owner._parameters[name] = _distributed(parameter, mesh, placement)
            whole = (
                functools.partial(_share_of, parts=mesh.size()) if path in shared else partial_of
            )
            places.append((owner, name, local_of if path in dims else whole))
    Local(places).wrap(module)
    _wrap(module, mesh, style, Shard(1) if scatters else Replicate())


def _distributed(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    cut = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(cut, requires_grad=parameter.requires_grad)


def _share_of(parameter: Any, parts: int) -> Any:
    """Return what this rank adds of a bias, of which the sum over ranks is the whole."""
    return partial_of(parameter) / parts


def _wrap(module: nn.Module, mesh: DeviceMesh, style: Any, outputs: Placement) -> None:
    forward = module.forward

    @functools.wraps(forward)
    def on_parts(x: torch.Tensor, *args: Any, **keywords: Any) -> torch.Tensor:
        try:
            made = forward(_given(x, mesh) if style == COLUMN else x, *args, **keywords)
        except Exception as error:
            _refuse_new(module, error)
            raise
        return made if style == COLUMN else _summed(made, mesh, outputs)

    module.forward = on_parts


def _given(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return a column's input; its gradient is the sum of what ranks make of it."""
    shared = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()])
    plain: torch.Tensor = shared.to_local(grad_placements=[Partial()])
    return plain


def _summed(addend: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> torch.Tensor:
    made = DTensor.from_local(addend, mesh, [Partial()], run_check=False)
    whole: torch.Tensor = made.redistribute(placements=[placement]).to_local()
    return whole


def _refuse_new(module: nn.Module, error: Exception) -> None:
    """Refuse an adapter that came after the cut.

    Raises:
        LayoutError: There is one.
    """
    new = [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]
    if new:
        raise LayoutError(
            f"The adapter with {new[0]} was added after parallelize.",
            why="tp cuts adapters with the layers that they are on, and holds this one whole",
            do="add all adapters (add_adapter), then parallelize",
        ) from error
