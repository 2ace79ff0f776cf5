"""Report the model that a cell trains, and how: the one whose weights its optimizer has.

A layout that an earlier cell made says nothing about a plain module that this one trains.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nbdist.engine.averaging.local_sgd import InRounds
from nbdist.engine.compat import torch_modules, torch_sharded
from nbdist.engine.data.lr_scaling import scaled_for
from nbdist.engine.kernel.records import Recorder
from nbdist.engine.layout.layout import Layout, layout_facts, live_layouts
from nbdist.engine.steps import keep
from nbdist.engine.steps.optimizer_wrapper import Wrapper
from nbdist.engine.training import training

FACTS = ("layout", "model", "parameters", "layout_explained", "proof")


def report(recorder: Recorder, optimizer: Optimizer) -> None:
    """Report an optimizer's model before its first step in a cell. Main thread."""
    recorder.fact(**facts_of(optimizer))
    recorder.add("optimizer", training.here.current_step(), numbers_of(optimizer))


def facts_of(optimizer: Optimizer) -> dict[str, str]:
    """Return the facts of the model that this optimizer changes.

    For a plain module that is only its class, if a cell has named it.
    """
    if isinstance(optimizer, Wrapper):
        return {"layout": optimizer.name, **_class_of_named(optimizer)}
    spread = spread_by(optimizer)
    if isinstance(spread, Layout):
        return layout_facts(spread)
    if spread is not None:
        count = sum(parameter.numel() for parameter in spread.parameters())
        name = torch_sharded.plain_name(spread.module)
        return {"layout": "ddp", "model": name, "parameters": str(count)}
    return _class_of_named(optimizer)


def _class_of_named(optimizer: Optimizer) -> dict[str, str]:
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for one in keep.here.named().values():
        if isinstance(one, nn.Module) and any(id(p) in own for p in one.parameters()):
            return {"model": torch_sharded.plain_name(torch_modules.uncompiled(one))}
    return {}


def model_of(optimizer: Optimizer) -> nn.Module | None:
    """Return the model that this optimizer changes, as a loop calls it; None: not known.

    Of plain modules, the one that a cell has named and that has most of its parameters.
    """
    spread = spread_by(optimizer)
    if spread is not None:
        return spread.model if isinstance(spread, Layout) else spread
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if (shared := torch_sharded.shared_by(parameters)) is not None:
        return shared.module
    own = {id(parameter) for parameter in parameters}
    found: nn.Module | None = None
    most = 0
    for one in keep.here.named().values():
        if isinstance(one, nn.Module):
            count = sum(id(p) in own for p in one.parameters())
            if count > most:
                found, most = torch_modules.uncompiled(one), count
    return found


def numbers_of(optimizer: Optimizer) -> dict[str, float]:
    """Return the values of an "optimizer" record; see `wire.Record`."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    group = optimizer.param_groups[0]
    values = {
        "lr": float(group.get("initial_lr", group["lr"])),
        "tensors": len(tensors),
        "numbers": sum(tensor.numel() for tensor in tensors),
    }
    spread, batch = spread_by(optimizer), scaled_for(optimizer)
    if isinstance(spread, Layout):
        values["parts"] = spread.shape.data_part(0)[1]
    elif spread is not None:
        values["parts"] = dist.get_world_size(spread.process_group)
    elif parts := _parts_by_hand(optimizer, tensors):
        values["parts"] = parts
    if batch is not None:
        values["scaled_for"] = batch
    return {name: float(value) for name, value in values.items()}


def _parts_by_hand(optimizer: Optimizer, tensors: Sequence[torch.Tensor]) -> int:
    """Return the parts of a batch where no layout and no DDP knows them; 0: unknown.

    Ranks that average their models now and then learn from all their samples together.
    """
    if isinstance(optimizer, InRounds):
        return dist.get_world_size()
    shared = torch_sharded.shared_by(tensors)
    if shared is not None:
        return len(shared.ranks)
    meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
    is_cut = [mesh.ndim == 1 and mesh.size() == dist.get_world_size() for mesh in meshes]
    return 1 if is_cut and all(is_cut) else 0  # tp over all ranks: they see the same samples


def is_plain(optimizer: Optimizer) -> bool:
    """Return whether this rank trains the model alone, as far as can be seen."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    is_shared = isinstance(optimizer, Wrapper) or any(isinstance(p, DTensor) for p in parameters)
    return not is_shared and spread_by(optimizer) is None


def spread_by(optimizer: Optimizer) -> Layout | DistributedDataParallel | None:
    """Return the wrapper that spreads the model of this optimizer; None for a plain module."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}

    def is_changed(model: nn.Module) -> bool:
        return any(id(parameter) in own for parameter in model.parameters())

    layouts = (known for known in live_layouts() if is_changed(known.model))
    return next(layouts, None) or next(filter(is_changed, torch_modules.live_ddps()), None)
