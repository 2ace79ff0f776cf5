"""The whole tensors of a layout: one at a time, by the names of the plain model; and back.

A rank needs memory for one whole tensor beside its own parts, or for `_PACK_BYTES` of small ones.
With pp a tensor comes from a stage that has it. The way back begins on rank 0.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from nbdist.engine.compat import torch_hooks, torch_modules, torch_quantized
from nbdist.engine.compat.checkpoints import tensor_bytes
from nbdist.engine.layout.plan.mesh import MeshShape

_SOURCE = 0  # the rank whose tensors are sent
_PACK_BYTES = 1 << 20  # sent at once


class LayoutFacts(Protocol):
    """The facts of a layout: how its model is spread, and over which ranks."""

    model: nn.Module
    shape: MeshShape
    mesh: DeviceMesh


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """The facts of one tensor of the plain model.

    Attributes:
        shape: Of the whole.
        dtype: Its type.
        is_saved: Whether it is part of the model's state: parameters, and buffers that are not
            constants.
        is_trained: Whether it requires a gradient.
        is_buffer: Whether it is no parameter.
        stage: The coordinate on the axis pp of a rank that has it; 0 without pp.
    """

    shape: torch.Size
    dtype: torch.dtype
    is_saved: bool = True
    is_trained: bool = False
    is_buffer: bool = False
    stage: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self.shape.numel() * self.dtype.itemsize


def names(model: nn.Module, *, duplicates: bool = False) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model by name; tied ones once, or by each name.

    Of a quantized one it is what it consists of.
    """
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=not duplicates))
    found.update(model.named_buffers(remove_duplicate=not duplicates))
    return torch_quantized.parts(found)


def places(
    model: nn.Module, *, duplicates: bool = False, meta: bool = False
) -> dict[str, TensorFacts]:
    """Return the facts of a model's tensors on this rank; of those on meta if asked."""
    saved = torch_quantized.parts(model.state_dict())
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return {
        name: TensorFacts(
            tensor.shape,
            tensor.dtype,
            is_saved=name in saved,
            is_trained=tensor.requires_grad,
            is_buffer=name in buffers,
        )
        for name, tensor in names(model, duplicates=duplicates).items()
        if meta or not tensor.is_meta
    }


def settle(model: nn.Module) -> None:
    """Make every parameter the shard that an optimizer sees, also after forwards alone.

    Later forwards gather again, as they must when weights have changed. No collective.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def table(spread: LayoutFacts, *, duplicates: bool = False) -> dict[str, TensorFacts]:
    """Return the layout's tensors over all its ranks; with pp in the order of stages.

    Collective with pp, where each rank has the names of its stages.
    """
    settle(spread.model)
    held = places(spread.model, duplicates=duplicates)
    if spread.shape.pp == 1:
        return held
    group = spread.mesh.get_group("pp")
    tables: list[Any] = [None] * spread.shape.pp
    dist.all_gather_object(tables, held, group=group)
    merged: dict[str, TensorFacts] = {}
    for stage, there in enumerate(tables):
        for name, place in there.items():
            merged.setdefault(name, replace(place, stage=stage))
    return merged


@torch.no_grad()
def tensors(spread: LayoutFacts) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer, whole and on every rank. Collective; all take all.

    Tensors that are whole here are yielded without a copy. Tied ones come once.
    """
    known = table(spread)
    held = names(spread.model)
    for name, place in known.items():
        tensor = held.get(name)
        if spread.shape.pp == 1:
            assert tensor is not None, "the table is made of these names"
            yield name, whole_of(tensor)
        else:
            yield name, _from_stage(spread, place, tensor)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor of which this rank may have a part. Collective for DTensors."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    whole: Any = tensor.detach()
    # One axis after the other, in the order in which fsdp and tp have cut: torch warns where
    # it gathers over two at once.
    for axis in range(whole.device_mesh.ndim):
        placements = [Replicate()] * (axis + 1) + list(whole.placements[axis + 1 :])
        whole = whole.redistribute(placements=placements)
    full: torch.Tensor = whole.to_local()
    return full


def put(target: torch.Tensor, full: torch.Tensor) -> None:
    """Overwrite this rank's part of a tensor by its part of `full`. No collective."""
    torch_hooks.local_part(target.detach()).copy_(part_of(full, target))


@torch.no_grad()
def part_of(full: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the part of `full` that this rank has of a tensor like `target`. No collective."""
    return torch_hooks.local_part(cut_like(full, target))


@torch.no_grad()
def cut_like(full: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a tensor that all ranks have, cut as `target` is. No collective."""
    if not isinstance(target, DTensor):
        return full
    cut: torch.Tensor = distribute_tensor(
        full.to(target.device), target.device_mesh, target.placements, src_data_rank=None
    )
    return cut


@torch.no_grad()
def from_rank_0(
    wanted: Mapping[str, TensorFacts], source: Mapping[str, torch.Tensor], device_type: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield rank 0's tensors of these names, on every rank. Collective; all take all.

    Args:
        wanted: The tensors to send, in this order; the same on every rank.
        source: Read on rank 0 only.
        device_type: Where they are sent and come out.
    """
    for pack in packs(wanted.items()):
        packed: dict[str, torch.Tensor] = {}
        for name, place in pack:
            if dist.get_rank() == _SOURCE:
                packed[name] = source[name].detach().to(device_type, place.dtype).contiguous()
            else:
                packed[name] = torch.empty(place.shape, dtype=place.dtype, device=device_type)
        if sent := [tensor for tensor in packed.values() if tensor.numel()]:
            torch_modules.broadcast_coalesced(sent, _SOURCE)
        yield from packed.items()


def packs(items: Iterable[tuple[str, TensorFacts]]) -> Iterator[list[tuple[str, TensorFacts]]]:
    """Yield the tensors that are sent at once: small ones together, a large one by itself."""
    pack: list[tuple[str, TensorFacts]] = []
    filled = 0
    for name, place in items:
        if pack and filled + place.nbytes > _PACK_BYTES:
            yield pack
            pack, filled = [], 0
        pack.append((name, place))
        filled += place.nbytes
    if pack:
        yield pack


def _from_stage(
    spread: LayoutFacts, place: TensorFacts, tensor: torch.Tensor | None
) -> torch.Tensor:
    """Return a whole tensor on the ranks of all stages: its stage sends it to the others."""
    group = spread.mesh.get_group("pp")
    if spread.mesh.get_local_rank("pp") == place.stage:
        assert tensor is not None, "the table says that this stage has it"
        full = whole_of(tensor).contiguous()
    else:
        full = torch.empty(place.shape, dtype=place.dtype, device=spread.mesh.device_type)
    if full.numel():
        # As bytes: gloo knows some dtypes only.
        dist.broadcast(tensor_bytes.raw(full), group=group, group_src=place.stage)
    return full
