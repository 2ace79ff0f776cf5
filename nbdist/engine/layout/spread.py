"""Spread a model in place: equal weights first, then one step an axis, in their fixed order.

What cuts a weight (tp) comes before what shards the pieces (fsdp) or copies them (dp).
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nbdist.engine.compat import torch_sharded
from nbdist.engine.layout.axes import ddp, fsdp, outside_calls
from nbdist.engine.layout.axes.cp import context as cp
from nbdist.engine.layout.axes.pp import pipeline
from nbdist.engine.layout.axes.pp.pipeline_step import PipelineStep
from nbdist.engine.layout.axes.pp.schedule_runner import ScheduleRunner, SequenceSlices
from nbdist.engine.layout.axes.tp import cuts, fit, tp
from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.policies import activation_checkpoint, compress, offload, precision
from nbdist.engine.layout.policies.efficiency import Compress
from nbdist.engine.layout.policies.policies import Policies
from nbdist.engine.layout.policies.two_levels import TwoLevels
from nbdist.engine.layout.spec import cost, random_numbers
from nbdist.engine.layout.spec import device_mesh as meshes
from nbdist.engine.layout.spec.blocks import find_blocks
from nbdist.engine.layout.spec.mesh import MeshShape
from nbdist.engine.layout.weights import broadcast, buffers, factory, meta_copy
from nbdist.errors import LayoutError


def spread(
    model: nn.Module,
    shape: MeshShape,
    policies: Policies,
    built: Mapping[str, torch.Tensor] | None = None,
) -> Layout:
    """Change the model, and return how. Collective.

    Args:
        model: With its weights, or on meta where `built` is given.
        shape: Sizes of the axes.
        policies: What was asked for beside.
        built: The weights by name on rank 0, of a model that a factory has made.
    """
    device_type, backend = _device_type(model)
    if policies.offload is not None:
        offload.check_device(device_type)
    broadcast.check_same_model(
        model, {"layout": shape.name, "policies": str(policies)}, device_type
    )
    plain, no_skeleton = meta_copy.copy_without_weights(model)
    if built is not None and not factory.is_thin(shape):
        meta_copy.materialise(model, device_type)
        factory.fill(model, built, device_type)
    # "cuda" is this rank's current device.
    model._apply(lambda t: t if t.is_meta else t.to(device_type))
    broadcast.broadcast(model)
    device_mesh = meshes.device_mesh(device_type, shape)
    blocks = find_blocks(model)
    size = _size(model, blocks)
    plan, token_bytes, context, stages = None, None, None, None
    if shape.tp > 1:
        plan, token_bytes = _plan_cuts(model, shape, policies, device_mesh, blocks)
    if shape.cp > 1:
        # Heads are counted as one rank of tp will have them.
        parts = fit.parts(model, plan, shape.tp) if plan and cuts.is_known(plan) else {}
        context = cp.find(model, policies.context, device_mesh["cp"], blocks, parts)
    if shape.pp > 1:
        if plain is None:
            raise LayoutError(
                f"pp asks a copy of the model without its weights for shapes, and {no_skeleton}.",
                do='make it a model that copy.deepcopy can copy, or use "zero3"',
            )
        stages = _Stages(model, plain, shape, policies, device_mesh, list(blocks))
        blocks = stages.blocks
    if plan is not None:
        runs = stages.runs if stages else [list(blocks.values())]
        here = _cut_weights(model, shape, policies, device_mesh, blocks, runs, plan)
        if stages is not None:
            stages.forward.run_always(here)
    if context is not None:
        begin = [names[0] for names in stages.names] if stages else []
        _cut_sequences(context, shape, policies, device_mesh, blocks, begin)
    local = _size(model, blocks)
    forgetting: dict[str, activation_checkpoint.Checkpointed] = {}
    if policies.checkpoint is not None:
        forgetting = activation_checkpoint.apply(
            policies.checkpoint, blocks, can_compile=not shape.changes_forward
        )
    if policies.offload is not None and policies.offload.activations:
        offload.apply(blocks.values())
    _share_batches(model, shape, policies, device_mesh, blocks)
    if built is not None and factory.is_thin(shape):
        factory.fill(model, built, device_type)
    if stages is None:
        buffers.BufferSync(model)
    return Layout(
        model,
        shape,
        device_mesh,
        tuple(blocks) if shape.fsdp > 1 else (),
        size,
        backend,
        local=local,
        plan=plan,
        policies=policies,
        token_bytes=token_bytes,
        skeleton=plain,
        no_skeleton=no_skeleton,
        pipeline=stages.pipeline(model, shape, policies, device_mesh, context) if stages else None,
        context=context,
        forgetting=forgetting,
    )


class _Stages:
    """What pp leaves of a model on this rank, and what will run it. Collective."""

    def __init__(
        self,
        model: nn.Module,
        plain: nn.Module,
        shape: MeshShape,
        policies: Policies,
        device_mesh: DeviceMesh,
        blocks: list[str],
    ) -> None:
        self._skeleton = plain
        imitation = precision.Imitation.of(policies.precision, has_units=shape.fsdp > 1)
        self._plan, self.forward = pipeline.find_plan(
            model, policies.pipeline, shape.pp, blocks, imitation
        )
        rank = device_mesh.get_local_rank("pp")
        pipeline.apply(model, self._plan, rank)
        self.names = [stage.blocks for stage in self._plan.of_rank(rank)]
        self.runs = [[model.get_submodule(name) for name in names] for names in self.names]
        self.blocks = {name: model.get_submodule(name) for names in self.names for name in names}

    def pipeline(
        self,
        model: nn.Module,
        shape: MeshShape,
        policies: Policies,
        device_mesh: DeviceMesh,
        context: cp.Context | None,
    ) -> PipelineStep:
        """Return what runs the steps, when all other axes have been laid."""
        self.forward.install()  # around what these have put there
        device = torch.device(device_mesh.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        dims = {name: dim for name, (_, dim) in context.hidden.items()} if context else {}
        parts = SequenceSlices(shape.cp, dims)
        runner = ScheduleRunner(
            self._plan, self.forward, self._skeleton, device_mesh["pp"], device, parts
        )
        return PipelineStep(model, runner, shape, device_mesh, policies)


def _plan_cuts(
    model: nn.Module,
    shape: MeshShape,
    policies: Policies,
    device_mesh: DeviceMesh,
    blocks: dict[str, nn.Module],
) -> tuple[cuts.TensorPlan, float | None]:
    """Return what tp will cut, and bytes sent for each token where the plan tells."""
    policy, axis = policies.tensor, device_mesh["tp"]
    plan = tp.find_plan(model, policy, axis, blocks)
    token_bytes = None
    if cuts.is_known(plan):
        summed, gathered = cuts.token_widths(plan, model)
        scatters = policy.sequence and dist.get_backend(axis.get_group()) == "gloo"
        logits = [] if policy.loss else gathered
        token_bytes = cost.token_bytes(summed, logits, shape.tp, scatters=scatters)
    return plan, token_bytes


def _cut_weights(
    model: nn.Module,
    shape: MeshShape,
    policies: Policies,
    device_mesh: DeviceMesh,
    blocks: dict[str, nn.Module],
    runs: list[list[nn.Module]],
    plan: cuts.TensorPlan,
) -> set[str]:
    """Cut over tp the weights that this rank has; return the modules that were cut."""
    # Twice where parameters are tied: both places are cut.
    held = model.named_parameters(remove_duplicate=False)
    here = plan.within({name.rpartition(".")[0] for name, _ in held})
    tp.apply(model, here, policies.tensor, device_mesh["tp"], blocks, runs)
    random_numbers.align(device_mesh["tp"], shape.data_part(dist.get_rank())[0])
    return {cut.module for cut in here.cuts}


def _cut_sequences(
    context: cp.Context,
    shape: MeshShape,
    policies: Policies,
    device_mesh: DeviceMesh,
    blocks: dict[str, nn.Module],
    begin: list[str],
) -> None:
    """Have blocks work on parts of sequences, over cp."""
    parts = shape.tp if policies.tensor.sequence else 1
    cp.apply(context, policies.context, device_mesh["cp"], blocks, parts, begin)
    random_numbers.align(device_mesh["cp"], shape.data_part(dist.get_rank())[0])


def _share_batches(
    model: nn.Module,
    shape: MeshShape,
    policies: Policies,
    device_mesh: DeviceMesh,
    blocks: dict[str, nn.Module],
) -> None:
    """Have gradients averaged over the ranks that share a batch, and shards made of the model."""
    chosen = policies.precision
    if shape.fsdp == 1 and chosen.compute != "fp32":
        precision.Autocast(model, chosen, device_mesh.device_type)
    if shape.fsdp > 1:
        averaging = meshes.averaging(device_mesh, shape)
        # A stage's micro-batches follow each other: its weights stay until the last backward.
        reshard = shape.gathers_twice
        fsdp.apply(
            model,
            blocks.values(),
            averaging,
            reshard_after_forward=reshard,
            in_precision=chosen,
            offloaded=offload.for_units(policies.offload),
        )
        if shape.pp == 1:
            outside_calls.watch(model, blocks)
    elif shape.pp > 1:
        return  # a step averages its gradients once, behind the last micro-batch
    elif shape.tp == 1:
        one_bucket = compress.needs_one_bucket(policies.compress, device_mesh.device_type)
        ddp.apply(model, meshes.averaging(device_mesh, shape), one_bucket=one_bucket)
        if policies.compress is not None:
            compress.apply(model, policies.compress, _levels(policies.compress, device_mesh))
        elif chosen.reduce != "fp32":
            compress.round_to(model, chosen.reduce)
    elif shape.replicas > 1:
        averaging = meshes.averaging(device_mesh, shape)
        for unit in (*blocks.values(), model):
            torch_sharded.replicate_sharded(unit, averaging, precision.reduce_dtype(chosen))


def _levels(policy: Compress, device_mesh: DeviceMesh) -> TwoLevels | None:
    """Return the groups that gradients are averaged inside of first. Collective."""
    if policy.between is None:
        return None
    assert policy.between != "hosts", "parallelize has counted the ranks of a host"
    return TwoLevels(meshes.two_levels(device_mesh.device_type, policy.between))


def _size(model: nn.Module, blocks: dict[str, nn.Module]) -> cost.ModelSize:
    """Return what of a model lies on this rank."""
    return cost.ModelSize(
        parameter_bytes=_bytes(model.parameters()),
        gradient_bytes=_bytes(p for p in model.parameters() if p.requires_grad),
        block_bytes=sum(_bytes(block.parameters()) for block in blocks.values()),
        parameters=sum(p.numel() for p in model.parameters()),
    )


def _device_type(model: nn.Module) -> tuple[str, str]:
    """Return where the model shall be and what carries its collectives.

    A model on a GPU stays there. One on the CPU moves to the GPU where the group has nccl, as
    nbdist starts it with one GPU a rank.
    """
    # "cpu:gloo,cuda:nccl", or the name of one backend for everything.
    config = str(dist.get_backend_config())
    on_gpu = any(p.is_cuda for p in model.parameters())
    has_nccl = "nccl" in config and torch.cuda.is_available()
    if on_gpu or has_nccl:
        return "cuda", "nccl" if has_nccl else "gloo"
    return "cpu", "gloo"


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    parts = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
    return sum(part.numel() * part.element_size() for part in parts)
