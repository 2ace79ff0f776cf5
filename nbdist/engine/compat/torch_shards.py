"""Private parts of torch in what cuts a tensor: who holds which part, and a part made elsewhere.

One of the modules that hold what nbdist uses of torch's private parts; see `torch_groups.py`.
`check()` says what broke when a version moves. Tried with torch 2.13.0 (CPU).
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nbdist.engine.compat.lacking import lacking

Ranks = tuple[int, ...]  # global


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    from torch.distributed.tensor import DTensor, _utils
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    broken = lacking(_utils, ["compute_local_shape_and_global_offset"], "DTensor's shapes")
    broken += lacking(DTensorSpec, ["__post_init__"], "DTensor's spec")
    if not hasattr(DTensor, "__slots__") or "_local_tensor" not in DTensor.__slots__:
        broken.append("DTensor keeps its local tensor elsewhere")
    return [f"torch {torch.__version__}: {what}" for what in broken]


def is_cut(tensor: object) -> bool:
    """Return whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def copies(tensor: Any, rank: int) -> frozenset[int]:
    """Return the ranks that hold the same part of a DTensor as `rank`, which is one of them.

    Those that differ from it in dims of the mesh alone over which the tensor is replicated; none,
    where `rank` is not in the mesh.
    """
    from torch.distributed.tensor import Replicate

    mesh: DeviceMesh = tensor.device_mesh
    placements = tensor.placements
    if any(placement.is_partial() for placement in placements):
        return frozenset()  # each rank has a summand of its own
    replicated = [isinstance(placement, Replicate) for placement in placements]
    return same_place(mesh.mesh, replicated, rank)


def same_place(ranks: torch.Tensor, replicated: Iterable[bool], rank: int) -> frozenset[int]:
    """Return the ranks at the same place as `rank` in all dims that are not `replicated`.

    Args:
        ranks: The ranks of a mesh, in its shape.
        replicated: Of each dim, whether what lies along it is the same.
        rank: One of them; otherwise none is returned.
    """
    found = (ranks == rank).nonzero()
    if not len(found):
        return frozenset()
    place = found[0].tolist()
    index = tuple(
        slice(None) if is_same else at for is_same, at in zip(replicated, place, strict=True)
    )
    return frozenset(ranks[index].flatten().tolist())


def common_copies(tensors: Iterable[Any], rank: int) -> frozenset[int]:
    """Return the ranks that hold the same parts of all these DTensors as `rank`."""
    parts = [copies(tensor, rank) for tensor in tensors]
    return frozenset.intersection(*parts) if parts else frozenset()


def on_each(value: torch.Tensor, like: Any) -> Any:
    """Return a tensor that each rank has whole as a DTensor on the mesh of another one."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh: DeviceMesh = like.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


# ---- A part that is made on another rank -------------------------------------------------------


def reduce_part(tensor: Any, *, with_contents: bool) -> tuple[Any, ...]:
    """Reduce a DTensor to a reduction as of `__reduce__`; on the other rank it is that one's part.

    Args:
        tensor: The DTensor, also a parameter.
        with_contents: Whether the other rank's part is equal to this one; else it gets zeros, in
            the shape of its own part.
    """
    local = tensor._local_tensor.detach()
    kind = type(tensor) if not isinstance(tensor, nn.Parameter) else nn.Parameter
    if with_contents:
        return make_part, (local, tensor._spec, kind, tensor.requires_grad)
    return make_empty, (local.dtype, local.device, tensor._spec, kind, tensor.requires_grad)


def make_part(local: torch.Tensor, spec: Any, kind: type, requires_grad: bool) -> Any:
    """Return a DTensor over a local tensor."""
    from torch.distributed.tensor import DTensor

    if kind is nn.Parameter:
        bare: Any = DTensor(local, spec, requires_grad=False)
        return nn.Parameter(bare, requires_grad=requires_grad)
    made: Any = DTensor(local, spec, requires_grad=requires_grad)
    return made


def make_empty(
    dtype: torch.dtype, device: torch.device, spec: Any, kind: type, requires_grad: bool
) -> Any:
    """Return a DTensor whose local part, of this rank's shape, is zeros."""
    from torch.distributed.tensor import _utils

    shape, _ = _utils.compute_local_shape_and_global_offset(
        spec.tensor_meta.shape, spec.mesh, spec.placements
    )
    return make_part(torch.zeros(shape, dtype=dtype, device=device), spec, kind, requires_grad)


def reduce_spec(spec: Any) -> tuple[Any, ...]:
    """Reduce a DTensorSpec; its hash is another one in each process."""
    shown = {
        name: value
        for name, value in vars(spec).items()
        if name not in ("mesh", "_hash", "placements")
    }
    return _make_spec, (spec.mesh, tuple(spec.placements), shown)


def _make_spec(mesh: DeviceMesh, placements: tuple[Any, ...], rest: dict[str, Any]) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    spec: Any = object.__new__(DTensorSpec)
    vars(spec).update(rest, mesh=mesh, placements=placements, _hash=None)
    return spec


def spec_type() -> type | None:
    """Return the class of DTensors' specs, where any has been imported."""
    module = sys.modules.get("torch.distributed.tensor._dtensor_spec")
    return None if module is None else module.DTensorSpec
