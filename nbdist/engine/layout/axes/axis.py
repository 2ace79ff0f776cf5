"""The interface of a layout's axis: how it changes a model, and its description.

One object for each axis of each layout. The base class does nothing, so each axis
overrides only what it needs. `registry` lists them.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nbdist.engine.layout.axes.cp.context import Context
from nbdist.engine.layout.axes.pp.pipeline_step import PipelineStep
from nbdist.engine.layout.axes.tp.cuts import TensorPlan
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.policies.policies import Policies


@dataclass
class Spreading:
    """A model while it is spread: the input of axes, and their results for each other.

    Attributes:
        model: On its device, with the same weights on every rank.
        shape: Sizes of the axes.
        policies: The policies beside the text.
        mesh: torch's DeviceMesh.
        blocks: The model's repeated blocks that this rank has, by name, in order.
        skeleton: The plain model as it was, without weights; None where it cannot be copied.
        no_skeleton: Why there is none.
        runs: Blocks that follow each other on this rank; empty if all do.
        begins: Names of blocks with which a stage of a pipeline begins.
        cut: Names of the modules that tp has cut here.
        plan: The modules that tp cuts; None without tp.
        context: The plan of cp; None without cp.
        pipeline: The pipeline's steps; None without pp.
        experts: How many ep shares out of each mixture; of several numbers what divides all.
    """

    model: nn.Module
    shape: MeshShape
    policies: Policies
    mesh: DeviceMesh
    blocks: dict[str, nn.Module]
    skeleton: nn.Module | None
    no_skeleton: str
    runs: list[list[nn.Module]] = field(default_factory=list)
    begins: list[str] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)
    plan: TensorPlan | None = None
    context: Context | None = None
    pipeline: PipelineStep | None = None
    experts: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """What a rank sends over an axis, forward and backward.

    Attributes:
        nbytes: Of activations, for one token or sample of its batch.
        unit: "token" or "sample".
        each_step: Bytes beside, whatever the batch.
    """

    nbytes: float
    unit: str = "token"
    each_step: float = 0.0


class Axis:
    """One axis of one layout. Main thread, on all ranks.

    Attributes:
        name: As in the layout's text.
    """

    name: ClassVar[str]

    @classmethod
    def is_in(cls, shape: MeshShape) -> bool:
        """Return whether a layout has this axis."""
        return shape.sizes[cls.name] > 1

    def refuse_compiled(self, shape: MeshShape, policies: Policies, *, is_wrapped: bool) -> None:
        """Refuse a model that is compiled as a whole: wrapped by `torch.compile`, or in place."""

    def check_device(self, shape: MeshShape, device_type: str, backend: str) -> None:
        """Refuse a device type or a backend. No collective."""

    def check(self, model: nn.Module) -> None:
        """Refuse a model that the axis cannot spread. No collective."""

    def plan(self, work: Spreading) -> None:
        """Plan the changes, on the whole model; change nothing."""

    def cut(self, work: Spreading) -> None:
        """Change the parameters and the computation of blocks, before policies wrap them."""

    def hold(self, work: Spreading) -> None:
        """Change how parameters are held, when all axes have cut."""

    def share(self, work: Spreading) -> None:
        """Average gradients, or make shards, of this rank's parameters."""

    def finish(self, work: Spreading) -> None:
        """Wrap the changes of all other axes."""

    def sent(self, shape: MeshShape) -> Sent | None:
        """Return the activations that are sent, if known."""
        return None

    def summary(self, shape: MeshShape) -> str:
        """Return a short description, or nothing."""
        return ""

    def details(self) -> str:
        """Return details: the last lines of an explanation."""
        return ""
