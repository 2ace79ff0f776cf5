"""Spread a model in place: equal weights first, then one step an axis, in their fixed order.

What cuts a weight (tp) comes before what shards the pieces (fsdp) or copies them (dp).
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nbdist.engine.compat import torch_sharded
from nbdist.engine.layout import (
    cost,
    cuts,
    ddp,
    fsdp,
    meshes,
    random_numbers,
    skeleton,
    tp,
    weights,
)
from nbdist.engine.layout.blocks import find_blocks
from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.mesh import MeshShape
from nbdist.engine.layout.policies import Policies


def spread(model: nn.Module, shape: MeshShape, policies: Policies) -> Layout:
    """Change the model, and return how. Collective."""
    device_type, backend = _device_type(model)
    weights.check_same_model(model, {"layout": shape.name, "policies": str(policies)}, device_type)
    plain, no_skeleton = skeleton.copy_without_weights(model)
    model.to(device_type)  # "cuda" is this rank's current device
    weights.broadcast(model)
    device_mesh = meshes.device_mesh(device_type, shape)
    blocks = find_blocks(model)
    size = _size(model, blocks)
    plan, token_bytes = None, None
    if shape.tp > 1:
        plan, token_bytes = _cut_weights(model, shape, policies, device_mesh, blocks)
    local = _size(model, blocks)
    _share_batches(model, shape, device_mesh, blocks)
    weights.BufferSync(model)
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
    )


def _cut_weights(
    model: nn.Module,
    shape: MeshShape,
    policies: Policies,
    device_mesh: DeviceMesh,
    blocks: dict[str, nn.Module],
) -> tuple[cuts.Plan, float | None]:
    """Cut weights over tp; return the plan, and bytes sent for each token where it tells."""
    policy, axis = policies.tensor, device_mesh["tp"]
    plan = tp.find_plan(model, policy, axis, blocks)
    token_bytes = None
    if cuts.is_known(plan):
        summed, gathered = cuts.token_widths(plan, model)
        token_bytes = cost.token_bytes(summed, [] if policy.loss else gathered, shape.tp)
    tp.apply(model, plan, policy, axis, blocks)
    random_numbers.align(axis, shape.data_part(dist.get_rank())[0])
    return plan, token_bytes


def _share_batches(
    model: nn.Module, shape: MeshShape, device_mesh: DeviceMesh, blocks: dict[str, nn.Module]
) -> None:
    """Have gradients averaged over the ranks that share a batch, and shards made of the model."""
    if shape.fsdp > 1:
        inner = device_mesh["dp", "fsdp"] if shape.dp > 1 else device_mesh["fsdp"]
        reshard = shape.reshard_after_forward
        fsdp.apply(model, blocks.values(), inner, reshard_after_forward=reshard)
    elif shape.tp == 1:
        ddp.apply(model, device_mesh)
    elif shape.dp > 1:
        for unit in (*blocks.values(), model):
            torch_sharded.replicate_sharded(unit, device_mesh["dp"])


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
