"""What an axis of a layout answers: how it changes a model, and what people should know of it.

One object for each axis of each layout. By itself an axis does nothing and says nothing, so each
overrides only what concerns it. `registry` lists them.
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
    """A model while it is spread: what axes are given, and what they leave to each other.

    Attributes:
        model: On its device, with the same weights on every rank.
        shape: Sizes of the axes.
        policies: What was asked for beside.
        mesh: torch's DeviceMesh.
        blocks: By name, in order: what the model repeats, and of that what this rank has.
        skeleton: The plain model as it was, without weights; None where it cannot be copied.
        no_skeleton: Why there is none.
        runs: Blocks that follow each other on this rank; empty where all do.
        begins: Names of blocks with which a stage of a pipeline begins.
        cut: Names of the modules that tp has cut here.
        plan: What tp cuts; None without tp.
        context: What cp does; None without cp.
        pipeline: The pipeline's steps; None without pp.
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


@dataclass(frozen=True, slots=True)
class Sent:
    """What a rank sends over an axis of activations, forward and backward.

    Attributes:
        nbytes: For one token or sample of its batch.
        unit: "token" or "sample".
    """

    nbytes: float
    unit: str = "token"


class Axis:
    """One axis of one layout. Main thread; all ranks alike.

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
        """Refuse a kind of device, or what carries its collectives. No collective."""

    def check(self, model: nn.Module) -> None:
        """Refuse a model that the axis cannot spread. No collective."""

    def plan(self, work: Spreading) -> None:
        """Find out what will be done, on the whole model; change nothing."""

    def cut(self, work: Spreading) -> None:
        """Change what blocks hold and compute, before policies stand around them."""

    def share(self, work: Spreading) -> None:
        """Have gradients averaged, or shards made, of what this rank holds then."""

    def finish(self, work: Spreading) -> None:
        """Stand around all that the other axes have done."""

    def sent(self, shape: MeshShape) -> Sent | None:
        """Return what is sent of activations, where that is known."""
        return None

    def summary(self, shape: MeshShape) -> str:
        """Return what people should know of it in any case, or nothing."""
        return ""

    def details(self) -> str:
        """Return what they may look up: the last lines of an explanation."""
        return ""
