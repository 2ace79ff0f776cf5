"""The axis `pp` of a layout."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from nbdist.engine.compat import torch_dry, torch_shards
from nbdist.engine.layout.axes.axis import Axis, Sent, Spreading
from nbdist.engine.layout.axes.pp import pipeline
from nbdist.engine.layout.axes.pp.pipeline_step import PipelineStep
from nbdist.engine.layout.axes.pp.schedule_runner import ScheduleRunner, SequenceSlices
from nbdist.engine.layout.axes.pp.stage_forward import StageForward
from nbdist.engine.layout.plan.blocks import own_alone
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.policies import precision
from nbdist.engine.layout.policies.policies import Policies
from nbdist.engine.tap.ops import WHY_NO_MESSAGES
from nbdist.shared.errors import LayoutError


class PipelineAxis(Axis):
    """Stages of a pipeline."""

    name = "pp"
    _plan: pipeline.StagePlan
    _forward: StageForward
    _shared_bytes = 0.0

    def refuse_compiled(self, shape: MeshShape, policies: Policies, *, is_wrapped: bool) -> None:
        """Refuse a wrapper that no step would call.

        Raises:
            LayoutError: There is one.
        """
        if is_wrapped:
            raise LayoutError(
                f'What torch.compile(model) returns cannot get the layout "{shape.name}".',
                why="it compiles what is called through it, and a pipeline's steps call parts of "
                "the model itself: nothing would be compiled",
                do="compile in place, before or after: model.compile(), or block.compile() for "
                "each block",
            )

    def check_device(self, shape: MeshShape, device_type: str, backend: str) -> None:
        """Refuse a GPU whose tensors cannot go from stage to stage.

        Raises:
            LayoutError: The group's backend for it is gloo.
        """
        if device_type == "cuda" and backend == "gloo":
            raise LayoutError(
                f'The layout "{shape.name}" cannot run on a GPU over gloo; the model is as it was.',
                why=f"stages send each other messages, and {WHY_NO_MESSAGES}",
                do='leave out pp, as in "zero3"; or keep the model on the CPU; or start with a GPU '
                "for each rank, which uses nccl",
            )

    def plan(self, work: Spreading) -> None:
        """Find the stages, proven by a small forward.

        Raises:
            LayoutError: The model cannot be copied without its weights, or be cut.
        """
        if work.skeleton is None:
            raise LayoutError(
                "pp asks a copy of the model without its weights for shapes, and "
                f"{work.no_skeleton}.",
                do='make it a model that copy.deepcopy can copy, or use "zero3"',
            )
        shape, policies = work.shape, work.policies
        imitation = precision.Imitation.of(policies.precision, has_units=shape.fsdp > 1)
        self._plan, self._forward = pipeline.find_plan(
            work.model, policies.pipeline, work.mesh["pp"], list(work.blocks), imitation
        )
        for pair in work.plan.pairs if work.plan else ():
            _refuse_apart((*pair.columns, pair.row), self._plan)

    def cut(self, work: Spreading) -> None:
        """Remove the weights of other ranks."""
        rank = work.mesh.get_local_rank("pp")
        pipeline.apply(work.model, self._plan, rank, work.mesh.device_type)
        stages = [stage.blocks for stage in self._plan.of_rank(rank)]
        blocks = {n: work.model.get_submodule(n) for names in stages for n in names}
        work.blocks = own_alone(work.model, blocks) if work.shape.fsdp > 1 else blocks
        work.runs = [[blocks[name] for name in names] for names in stages]
        work.begins = [names[0] for names in stages]

    def finish(self, work: Spreading) -> None:
        """Wrap the changes of the other axes, and make the runner of the steps."""
        assert work.skeleton is not None, "it is asked for by the plan"
        self._forward.run_always(work.cut)
        self._forward.install()
        device = torch.device(work.mesh.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        hidden = work.context.hidden if work.context else {}
        slices = SequenceSlices(work.shape.cp, {name: dim for name, (_, dim) in hidden.items()})
        runner = ScheduleRunner(
            self._plan,
            self._forward,
            work.skeleton,
            work.mesh["pp"],
            device,
            slices,
            _same_stages(work.mesh),
        )
        work.pipeline = PipelineStep(work.model, runner, work.shape, work.mesh, work.policies)
        self._shared_bytes = work.pipeline.shared.mean_bytes()

    def sent(self, shape: MeshShape) -> Sent:
        """Return the traffic between stages: of a sequence the rank's part, and shared weights'."""
        return Sent(self._plan.sent_bytes / shape.cp, self._plan.unit, self._shared_bytes)

    def summary(self, shape: MeshShape) -> str:
        """Return the schedule, and which blocks each stage has."""
        return str(self._plan)


def _refuse_apart(cut: tuple[str, ...], plan: pipeline.StagePlan) -> None:
    """Refuse to send another stage the part that a rank of tp has of the features.

    Raises:
        LayoutError: A rank has one of these modules, and not another.
    """
    for rank in range(plan.pp):
        gone = [f"{name}." for name in plan.elsewhere(rank)]
        is_gone = {any(f"{name}.".startswith(one) for one in gone) for name in cut}
        if len(is_gone) > 1:
            raise LayoutError(
                f"pp cuts the model between {cut[0]} and {cut[-1]}, which tp cuts together.",
                why="a stage sends whole hidden states, and between these two each rank of tp has "
                "a part of the features",
                do="leave out pp or tp, or name the first block of each stage so that both lie on "
                'one, as in Pipeline(split=["0", "4"])',
            )


@torch_dry.on_numbers
def _same_stages(mesh: DeviceMesh) -> tuple[tuple[int, ...], ...]:
    """Return sets of ranks that have the same part of the model: along dp."""
    is_dp = [name == "dp" for name in mesh.mesh_dim_names or ()]
    sets = {
        tuple(sorted(torch_shards.same_place(mesh.mesh, is_dp, rank)))
        for rank in mesh.mesh.flatten().tolist()
    }
    return tuple(sorted(sets))
