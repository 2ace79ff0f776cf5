"""The axes, in the order in which they change a model, and are explained.

A stage is taken out of the model first, so that its weights alone are cut. What cuts a weight (ep,
tp) comes before what shards the pieces (fsdp) or copies them (dp). Their order in the mesh is
another: `plan/axis_facts`.
"""

from nbdist.engine.layout.axes.axis import Axis
from nbdist.engine.layout.axes.cp.context_axis import ContextAxis
from nbdist.engine.layout.axes.ddp import ReplicaAxis
from nbdist.engine.layout.axes.ep.expert_axis import ExpertAxis
from nbdist.engine.layout.axes.fsdp import ShardAxis
from nbdist.engine.layout.axes.pp.pipeline_axis import PipelineAxis
from nbdist.engine.layout.axes.tp.tensor_axis import TensorAxis
from nbdist.engine.layout.plan.axis_facts import AXES
from nbdist.engine.layout.plan.mesh import MeshShape

_KINDS: tuple[type[Axis], ...] = (
    PipelineAxis,
    ExpertAxis,  # tokens are exchanged within what tp sums
    TensorAxis,
    ContextAxis,
    ShardAxis,
    ReplicaAxis,
)


def axes_of(shape: MeshShape) -> tuple[Axis, ...]:
    """Return new axes of a layout."""
    return tuple(kind() for kind in _KINDS if kind.is_in(shape))


def innermost_first(axes: tuple[Axis, ...]) -> list[Axis]:
    """Return axes in the order in which they plan: each on what the inner ones have found."""
    return sorted(axes, key=lambda axis: AXES.index(axis.name), reverse=True)
