"""Spread a model in place: equal weights first, then axis by axis.

plan     each axis plans its changes, on the whole model, from the innermost outwards
cut      blocks hold less, or compute differently
hold     parameters are of one kind
         policies wrap blocks
share    gradients are averaged, or shards made
finish   wrappers of the whole model
"""

from collections.abc import Iterable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nbdist.engine.compat import torch_quantized
from nbdist.engine.layout.axes.axis import Spreading
from nbdist.engine.layout.axes.registry import axes_of, innermost_first
from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.plan import cost, numbers
from nbdist.engine.layout.plan import device_mesh as meshes
from nbdist.engine.layout.plan.blocks import find_blocks
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.policies import activation_checkpoint, eight_bits, offload
from nbdist.engine.layout.policies.policies import Policies
from nbdist.engine.layout.weights import broadcast, buffers, meta_copy
from nbdist.engine.layout.weights.factory import WeightSource


def spread(
    model: nn.Module,
    shape: MeshShape,
    policies: Policies,
    source: WeightSource | None = None,
) -> Layout:
    """Change the model, and return how. Collective.

    Args:
        model: With its weights, or on meta where `source` is given.
        shape: Sizes of the axes.
        policies: The policies beside the text.
        source: The source of the weights of a model on meta.
    """
    device_type, backend = _device_type(model)
    axes = axes_of(shape)
    for axis in axes:
        axis.check_device(shape, device_type, backend)
    if policies.offload is not None:
        offload.check_device(device_type)
    eight_bits.check_device(policies.precision, device_type)
    if numbers.are_here():
        broadcast.check_same_model(
            model, {"layout": shape.name, "policies": str(policies)}, device_type
        )
    plain, no_skeleton = meta_copy.copy_without_weights(model)
    if numbers.are_here():
        # "cuda" is this rank's current device.
        model._apply(lambda t: t if t.is_meta else t.to(device_type))
        broadcast.broadcast(model)
    blocks = find_blocks(model)
    size = _size(model, blocks)
    device_mesh = meshes.device_mesh(device_type, shape)
    work = Spreading(model, shape, policies, device_mesh, blocks, plain, no_skeleton)
    with source.planning(model, shape, device_type) if source else nullcontext():
        for axis in innermost_first(axes):
            axis.plan(work)
    layers = eight_bits.layers_of(model, policies.precision, shape.tp)
    for axis in axes:
        axis.cut(work)
    for axis in axes:
        axis.hold(work)
    local = _size(model, work.blocks)
    eight_bits.apply(model, layers, policies.precision, device_type)
    eight_bits.say(policies.precision, device_type)
    forgetting: dict[str, activation_checkpoint.Checkpointed] = {}
    if policies.checkpoint is not None:
        forgetting = activation_checkpoint.apply(
            policies.checkpoint, work.blocks, can_compile=not shape.changes_forward
        )
    if policies.offload is not None and policies.offload.activations:
        offload.apply(work.blocks.values())
    if source is not None:
        source.fill(model, shape, device_type, shared=False)
    for axis in axes:
        axis.share(work)
    if source is not None:
        source.fill(model, shape, device_type, shared=True)
    for axis in axes:
        axis.finish(work)
    if work.pipeline is None:
        buffers.BufferSync(model)
    return Layout(work, axes, size, local, backend, forgetting)


def _size(model: nn.Module, blocks: dict[str, nn.Module]) -> cost.ModelSize:
    """Return the size of a model's part on this rank."""
    whole = {p for p in model.parameters() if torch_quantized.stays_whole(p)}
    in_blocks = (set(block.parameters()) - whole for block in blocks.values())
    return cost.ModelSize(
        parameter_bytes=_bytes(set(model.parameters()) - whole),
        gradient_bytes=_bytes(p for p in model.parameters() if p.requires_grad),
        block_bytes=sum(map(_bytes, in_blocks)),
        parameters=sum(p.numel() for p in model.parameters()),
        whole_bytes=_bytes(whole),
        whole_parameters=sum(p.numel() for p in whole),
    )


def _device_type(model: nn.Module) -> tuple[str, str]:
    """Return the model's device type and the backend of its collectives.

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
    held = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
    return sum(part.nbytes for one in held for part in torch_quantized.plain(one))
