"""The DeviceMeshes of layouts: one a shape and process group, shared, for each makes new groups."""

import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nbdist.engine.layout.mesh import MeshShape

_meshes: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, DeviceMesh]]" = (
    weakref.WeakKeyDictionary()
)


def device_mesh(device_type: str, shape: MeshShape) -> DeviceMesh:
    """Return the mesh, one a shape and process group: each new one would make new groups."""
    made = _meshes.setdefault(_world(), {})
    key = (device_type, tuple(shape.axes.items()))
    if key not in made:
        made[key] = init_device_mesh(
            device_type, tuple(shape.axes.values()), mesh_dim_names=tuple(shape.axes)
        )
    return made[key]


def hand_over() -> dict[Any, DeviceMesh]:
    """Return the meshes that layouts share: a newcomer makes no new groups where others do not."""
    return dict(_meshes.get(_world(), {}))


def take_over(meshes: dict[Any, DeviceMesh]) -> None:
    """Share, on a newcomer, the meshes that `hand_over` returned."""
    whole = {key: made for key, made in meshes.items() if isinstance(made, DeviceMesh)}
    _meshes.setdefault(_world(), {}).update(whole)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
