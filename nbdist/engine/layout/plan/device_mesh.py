"""The DeviceMeshes of layouts: one per shape and process group, shared, for each makes new groups.

Gradients are averaged over all ranks but those of pp and tp. Those of cp see parts of the same
samples; they count among the shards of fsdp, and without it among the replicas of dp, as a dim of
their own: `fsdp_cp` or `dp_cp`, flattened, with groups that recoveries form again as any other.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nbdist.engine.compat import torch_dry, torch_sharded
from nbdist.engine.layout.plan import numbers
from nbdist.engine.layout.plan.mesh import MeshShape


class Meshes:
    """The meshes that layouts of a process share, by process group."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, DeviceMesh]] = (
            weakref.WeakKeyDictionary()
        )

    def get(self, device_type: str, dims: Mapping[str, int]) -> DeviceMesh:
        """Return the mesh of these dims, made if there is none yet. Collective."""
        made = self._made.setdefault(_world(), {})
        key = (device_type, tuple(dims.items()))
        # A new rank may not have it: no living rank knows a dim whose ranks all died in the cell
        # that made the mesh. Then all ranks make a new one.
        held = [key in made] * dist.get_world_size()
        if numbers.are_here():
            dist.all_gather_object(held, key in made)
        if not all(held):
            sizes = tuple(dims.values())
            init = torch_dry.on_numbers(init_device_mesh)
            made[key] = init(device_type, sizes, mesh_dim_names=tuple(dims))
        return made[key]

    def hand_over(self) -> dict[str, tuple[Any, DeviceMesh]]:
        """Return the meshes: a new rank makes no new groups where others do not."""
        made = self._made.get(_world(), {})
        return {str(i): (key, mesh) for i, (key, mesh) in enumerate(made.items())}

    def take_over(self, meshes: dict[str, tuple[Any, DeviceMesh]]) -> None:
        """Share, on a new rank, the meshes that `hand_over` returned."""
        whole = {key: made for key, made in meshes.values() if isinstance(made, DeviceMesh)}
        self._made.setdefault(_world(), {}).update(whole)


def device_mesh(device_type: str, shape: MeshShape) -> DeviceMesh:
    """Return the mesh, one per shape and process group: each new one would make new groups.

    Collective.
    """
    return here.get(device_type, shape.axes)


def two_levels(device_type: str, inside: int) -> DeviceMesh:
    """Return the mesh of all ranks in groups of so many neighbours: `between` x `inside`.

    Collective.
    """
    groups = dist.get_world_size() // inside
    return here.get(device_type, {"between": groups, "inside": inside})


def averaging(mesh: DeviceMesh, shape: MeshShape) -> DeviceMesh:
    """Return the ranks that gradients are averaged over: replicas, shards, or both, in this order.

    Collective, the first time, where cp is beside another axis.
    """
    if shape.fsdp > 1 and shape.dp > 1:
        return torch_sharded.joined([mesh["dp"], _as_one(mesh, shape.averaged[1:])])
    return _as_one(mesh, shape.averaged or ["dp"])


def _as_one(mesh: DeviceMesh, axes: list[str]) -> DeviceMesh:
    """Return some axes as one dim."""
    return torch_sharded.flattened(mesh[tuple(axes)]) if len(axes) > 1 else mesh[axes[0]]


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


here = Meshes()
