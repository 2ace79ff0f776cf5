"""A model is spread once: by nbdist or by another library; a second spreading is refused.

Other libraries keep working on top of a layout where they can leave the model unchanged, and beside
it, on models of their own. Where neither is possible, an error says so, before anything is changed.
"""

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nbdist.engine.compat import torch_modules, torch_wrappers
from nbdist.engine.compat.libraries import third_parties
from nbdist.engine.layout.axes import fsdp
from nbdist.engine.layout.layout import Layout, live_layouts
from nbdist.engine.steps import guard
from nbdist.shared.errors import LayoutError

# Wrappers by their class's module and name: none of these libraries has to be imported.
_WRAPPERS = {
    ("lightning.fabric.wrappers", "_FabricModule"): "Fabric.setup",
    ("lightning_fabric.wrappers", "_FabricModule"): "Fabric.setup",
    ("deepspeed.runtime.engine", "DeepSpeedEngine"): "DeepSpeed",
}


def look_on() -> None:
    """Have torch, Accelerate and DeepSpeed check here before they spread a model, or clip."""
    torch_wrappers.here.before_wrapping(refuse_again)
    torch_wrappers.here.before_clipping(_before_clipping)
    third_parties.adapt(is_spread, refuse_own_samples, refuse_saving, refuse_again)


def _before_clipping(
    parameters: list[torch.Tensor], args: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    refuse_own_norm(parameters)
    guard.here.evidence.clips(parameters, (args, keywords))


def wrapper_of(model: nn.Module) -> str | None:
    """Return which library has spread a model, in words; None if none but nbdist has."""
    kind = type(model)
    named = _WRAPPERS.get((kind.__module__, kind.__name__))
    if named is not None:
        return named
    if any(hasattr(p, "ds_id") for p in model.parameters()):
        return "DeepSpeed"  # ZeRO-3 keeps them elsewhere, and leaves these empty
    by = _torchs_wrapper_of(model)
    is_accelerates = by is not None and getattr(model, "_is_accelerate_prepared", False)
    return f"Accelerator.prepare ({by})" if is_accelerates else by


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a layout for a model that another library has spread.

    Raises:
        LayoutError: Names the library.
    """
    by = wrapper_of(model)
    if by is not None:
        raise LayoutError(
            f"This model is spread already, by {by}.",
            why="nbdist shows and recovers such a model as it is; a second layout would average "
            "twice",
            do="leave parallelize out, or build the model again without that wrapper",
        )


def refuse_again(by: str, module: nn.Module) -> None:
    """Refuse to let `by` spread a module of which a layout has spread any parameter.

    Raises:
        LayoutError: There is such a layout.
    """
    layouts = _layouts_of(module.parameters())
    if layouts:
        raise LayoutError(
            f'{by} got a model that has the layout "{layouts[0].name}" already.',
            why="a model is spread once; a second time would send all gradients twice, or fail",
            do="train the model as it is, or leave parallelize out. Accelerate and Trainer take it "
            "as it is; Lightning and Fabric do with ModelParallelStrategy",
        )


def refuse_own_norm(parameters: list[torch.Tensor]) -> None:
    """Refuse torch's clipping of a pipeline's gradients, which uses the norm of this rank's stages.

    Raises:
        LayoutError: A layout with pp has spread any of these parameters.
    """
    pipelines = [x for x in live_layouts() if x.pipeline is not None]
    for layout in _holding(parameters, pipelines):
        raise LayoutError(
            "torch.nn.utils.clip_grad_norm_ got parameters of a model with the layout "
            f'"{layout.name}".',
            why="it takes the norm of what this rank has, and each stage would be clipped by "
            "another factor",
            do="layout.clip_grad_norm_(max_norm), which takes the norm over all stages; nothing "
            "was clipped",
        )


def is_spread(model: nn.Module) -> bool:
    """Return whether layouts have spread `model`, so that Accelerate must not.

    Raises:
        LayoutError: Only a part of it has a layout, or its ranks must share samples (tp).
    """
    layouts = _layouts_of(model.parameters())
    if not layouts:
        return False
    first = layouts[0]
    covered = {id(p) for layout in layouts for p in layout.model.parameters()}
    bare = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in covered]
    if bare:
        raise LayoutError(
            f'A part of this model has the layout "{first.name}", and {bare[0]} has none.',
            why="the gradients of the rest would not be averaged",
            do="parallelize the whole model that Accelerate gets",
        )
    _check_samples(first)
    return True


def refuse_own_samples(optimizer: Optimizer) -> None:
    """Refuse Accelerate's split of batches for a model whose ranks must share samples (tp).

    Raises:
        LayoutError: The optimizer's model has such a layout.
    """
    for layout in _layouts_of(p for group in optimizer.param_groups for p in group["params"]):
        _check_samples(layout)


def refuse_saving(model: nn.Module) -> None:
    """Refuse checkpoints of shards by the Trainer, which saves on rank 0 only.

    Raises:
        LayoutError: The model's parameters are shards.
    """
    for layout in _layouts_of(model.parameters()):
        if layout.shape.dp < layout.shape.world_size:
            raise LayoutError(
                f'The Trainer saves what rank 0 holds, and of the layout "{layout.name}" that is '
                "only a part.",
                do='TrainingArguments(save_strategy="no"), and layout.state_dict() afterwards, '
                'which is whole; or the layout "ddp"',
            )


def _check_samples(layout: Layout) -> None:
    if layout.shape.data_part(0)[1] < layout.shape.world_size:
        raise LayoutError(
            f'Accelerate gives each rank samples of its own, and in the layout "{layout.name}" '
            "some ranks need the same.",
            do="loop over nbdist.loader(...), and give Accelerate the optimizer and that loader "
            "alone; in Lightning and Fabric, ModelParallelStrategy knows which ranks share samples",
        )


def _torchs_wrapper_of(model: nn.Module) -> str | None:
    if isinstance(model, DistributedDataParallel):
        return "DistributedDataParallel"
    if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
        return "FullyShardedDataParallel"
    if fsdp.is_sharded(model) or torch_modules.reducer_of(model) is not None:
        return "torch's fully_shard or replicate"
    if _is_held_by_ddp(model):
        gc.collect()  # one that only a reference cycle keeps averages nothing
        if _is_held_by_ddp(model):
            return "DistributedDataParallel, which holds it"
    return None


def _is_held_by_ddp(model: nn.Module) -> bool:
    own = {id(p) for p in model.parameters()}
    return any(id(p) in own for ddp in torch_modules.live_ddps() for p in ddp.parameters())


def _layouts_of(parameters: Iterable[nn.Parameter]) -> list[Layout]:
    """Return the layouts that hold any of these parameters."""
    return _holding(parameters, live_layouts())


def _holding(parameters: Iterable[torch.Tensor], layouts: list[Layout]) -> list[Layout]:
    wanted = {id(p) for p in parameters} if layouts else set[int]()
    return [x for x in layouts if any(id(p) in wanted for p in x.model.parameters())]
