"""Which axes a layout has, and in which order they change a model."""

from typing import Any

import pytest

from nbdist.engine.layout.axes.registry import axes_of, innermost_first
from nbdist.engine.layout.plan.axis_facts import AXES
from nbdist.engine.layout.plan.mesh import MeshShape


@pytest.mark.parametrize("axis", AXES)
def test_every_axis_of_the_mesh_is_in_the_registry(axis: str) -> None:
    sizes: dict[str, Any] = {axis: 2}
    shape = MeshShape(**sizes)
    assert axis in [found.name for found in axes_of(shape)]


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        (MeshShape(), ["dp"]),
        (MeshShape(dp=2), ["dp"]),
        (MeshShape(dp=2, fsdp=2), ["fsdp"]),
        (MeshShape(cp=2), ["cp", "dp"]),
        (MeshShape(pp=2, fsdp=2, cp=2, tp=2), ["pp", "tp", "cp", "fsdp"]),
        (MeshShape(ep=2), ["ep", "dp"]),
        (MeshShape(pp=2, fsdp=2, ep=2), ["pp", "ep", "fsdp"]),
        (MeshShape(fsdp=2, ep=2, tp=2), ["ep", "tp", "fsdp"]),
    ],
)
def test_what_cuts_the_model_comes_before_what_shards_or_copies_it(
    shape: MeshShape, names: list[str]
) -> None:
    assert [axis.name for axis in axes_of(shape)] == names


def test_axes_plan_from_the_innermost_outwards() -> None:
    axes = axes_of(MeshShape(pp=2, dp=2, cp=2, tp=2))
    assert [axis.name for axis in innermost_first(axes)] == ["tp", "cp", "dp", "pp"]


def test_two_layouts_share_no_axis() -> None:
    (one,), (other,) = axes_of(MeshShape(fsdp=2)), axes_of(MeshShape(fsdp=2))
    assert one is not other
