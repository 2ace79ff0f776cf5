"""Cut what torch's styles cannot: layers with adapters, packed or transposed ones, experts.

    column   x ─▶ (its gradient is summed) ─▶ layer, adapters: parts of the outputs
    copied   x ─▶ (its gradient is summed) ─▶ layer: all outputs, of which ranks use parts of heads
    row      parts of x ─▶ layer, adapters: addends ─▶ (summed) ─▶ outputs
    experts  x ─▶ (its gradient is summed) ─▶ both: addends ─▶ (summed) ─▶ outputs; attention, too

Between the ends a rank computes with plain tensors: its parts of what is cut, and the whole of
the rest, whose gradients are summed. So an adapter sends nothing beside what its layer sends,
but gradients of what it has whole: `lora_A` of a column, `lora_B` of a row. What a module computes
in between has no matter, as long as a forward proves it (`proof`).
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
from torch.utils._pytree import tree_map_only

from nbdist.engine.compat import torch_sharded
from nbdist.engine.layout.axes.tp import multihead, sections
from nbdist.engine.layout.axes.tp.cuts import (
    ATTENTION,
    BOTH,
    COLUMN,
    COLUMNS,
    COPIED,
    HEADS,
    PACKED,
    ROW,
    Cut,
    added_once,
    cut_dims,
)
from nbdist.engine.layout.axes.tp.local_parameters import Local, Place, local_of, partial_of
from nbdist.engine.layout.plan.adapted import layer_in
from nbdist.shared.errors import LayoutError


def is_cut_here(module: nn.Module, cut: Cut) -> bool:
    """Return whether torch's styles cannot make a cut."""
    is_odd = layer_in(module) is not None or not isinstance(module, nn.Linear)
    return cut.style in (PACKED, COPIED, HEADS, *BOTH) or (cut.style in (COLUMN, ROW) and is_odd)


def apply(module: nn.Module, cut: Cut, mesh: DeviceMesh, *, scatters: bool) -> None:
    """Cut a layer and its adapters, in place; of heads' numbers the parameters alone.

    Args:
        module: The layer, or the wrapper around it, with the same numbers on every rank.
        cut: One of which `is_cut_here` is true.
        mesh: The axis `tp`.
        scatters: With sequence parallel: a row's outputs are parts of the sequence.
    """
    dims, shared = cut_dims(cut, module), set(added_once(cut.style, module))
    if cut.style == ATTENTION:
        module.forward = multihead.local_forward(module, mesh.get_local_rank())
    places: list[Place] = []
    for prefix, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            path = f"{prefix}.{name}" if prefix else name
            if parameter is None or (cut.style == HEADS and path not in dims):
                continue
            placement = Shard(dims[path].dim) if path in dims else Replicate()
            owner._parameters[name] = _distributed(parameter, mesh, placement)
            if path in dims:
                make: Any = functools.partial(_computed, cut=dims[path], mesh=mesh)
            elif path in shared:
                make = functools.partial(_share_of, parts=mesh.size())
            else:
                make = partial_of
            places.append((owner, name, make))
    Local(places).wrap(module)
    if cut.style != HEADS:
        _wrap(module, mesh, cut.style, Shard(1) if scatters else Replicate())


def _distributed(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    cut = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(cut, requires_grad=parameter.requires_grad)


def _computed(parameter: Any, cut: sections.Sections, mesh: DeviceMesh) -> torch.Tensor:
    return sections.computed(local_of(parameter), cut, mesh)


def _share_of(parameter: Any, parts: int) -> Any:
    """Return what this rank adds of a bias, of which the sum over ranks is the whole."""
    return partial_of(parameter) / parts


def _wrap(module: nn.Module, mesh: DeviceMesh, style: Any, outputs: Placement) -> None:
    forward = module.forward
    takes_whole = style in (*COLUMNS, *BOTH)

    @functools.wraps(forward)
    def on_parts(*args: Any, **keywords: Any) -> Any:
        if takes_whole:
            # One tensor that is given twice stays one: its gradients are added, then sent.
            given = functools.cache(functools.partial(_given, mesh=mesh))
            args, keywords = tree_map_only(_is_shared, given, (args, keywords))
        try:
            made = forward(*args, **keywords)
        except Exception as error:
            _refuse_new(module, error)
            raise
        if style in COLUMNS:
            return made
        return tree_map_only(torch.Tensor, lambda part: _summed(part, mesh, outputs), made)

    module.forward = on_parts


def _is_shared(value: object) -> bool:
    """Return whether a value is one of which ranks compute differently, with a gradient."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _given(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return what ranks compute with differently; its gradient is the sum of what they make."""
    shared = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()])
    plain: torch.Tensor = shared.to_local(grad_placements=[Partial()])
    return plain


def _summed(addend: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> torch.Tensor:
    made = DTensor.from_local(addend, mesh, [Partial()], run_check=False)
    return torch_sharded.as_own(made.redistribute(placements=[placement]).to_local())


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
