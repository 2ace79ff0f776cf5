"""The models of a training on this rank, found from its living optimizers.

A model's tensors go by the names of the plain model, so that any layout reads them. It is *apart*
where ranks train models of their own (no layout, no DDP, local SGD): then each rank's is saved by
itself. Main thread.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nbdist.engine.compat import torch_modules, torch_quantized, torch_sharded
from nbdist.engine.layout.layout import Layout, layout_of, live_layouts
from nbdist.engine.layout.weights import full_tensors
from nbdist.engine.steps import keep
from nbdist.engine.steps.optimizer_wrapper import ApartWrapper
from nbdist.shared.errors import CheckpointError

Optimizer = torch.optim.Optimizer

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass
class TrainedModel:
    """One model of a training.

    Attributes:
        name: Of its class, and a number where there are several, in the order of making.
        module: The plain module; its names are those of the model as it was written.
        layout: How it is spread; None where nbdist has not spread it.
        is_apart: Whether this rank trains one of its own.
        tensors: Parameters and saved buffers, each once, by name; without other stages'.
        aliases: Other names of tied tensors, and the name in `tensors` or of another stage.
        elsewhere: Names of buffers that another rank saves: where each has its own (batch norm
            under DDP), those of the first rank count.
    """

    name: str
    module: nn.Module
    layout: Layout | None
    is_apart: bool
    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]
    elsewhere: frozenset[str] = frozenset()

    @property
    def saved(self) -> dict[str, torch.Tensor]:
        """What this rank has saved."""
        return {n: t.detach() for n, t in self.tensors.items() if n not in self.elsewhere}

    @property
    def spread_as(self) -> str:
        """How it is spread, in a word or two."""
        if self.layout is not None:
            return self.layout.name
        if self.is_apart:
            return "a model a rank"
        cut = any(isinstance(tensor, DTensor) for tensor in self.tensors.values())
        return "fully_shard" if cut else "ddp"


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def clean(name: str) -> str:
    """Return a tensor's name without what torch's wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def modules(optimizers: Iterable[Optimizer]) -> list[nn.Module]:
    """Return the outermost modules that are trained or kept, in the order of making."""
    trained = {id(p) for o in optimizers for p in parameters_of(o)}
    kept = [_plain(v) for v in keep.here.kept().values() if isinstance(v, nn.Module)]
    candidates = [layout.model for layout in live_layouts()]
    candidates += [torch_modules.replicated_by(d) or _plain(d) for d in torch_modules.live_ddps()]
    candidates += [module for module, _ in torch_sharded.live_fsdp2_roots()]
    candidates += [_plain(v) for v in keep.here.named().values() if isinstance(v, nn.Module)]
    unique = {id(m): m for m in candidates}
    for module in unique.values():  # a forward alone leaves gathered parameters in place of shards
        full_tensors.settle(module)
    found = [m for m in unique.values() if any(id(p) in trained for p in m.parameters())]
    found += [m for m in kept if all(m is not other for other in found)]
    inside = {id(part) for m in found for part in m.modules() if part is not m}
    return [m for m in found if id(m) not in inside]


def model_in(one: Any) -> nn.Module | None:
    """Return the plain module that an object is, or is around; None: it is no model."""
    if isinstance(one, Layout):
        return one.model
    return _plain(one) if isinstance(one, nn.Module) else None


def ddp_of(module: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP that averages a plain module's gradients, if any does."""
    around = (ddp for ddp in torch_modules.live_ddps() if _plain(ddp) is module)
    return torch_modules.reducer_of(module) or next(around, None)


def _plain(module: nn.Module) -> nn.Module:
    module = torch_modules.uncompiled(module)
    return module.module if isinstance(module, DistributedDataParallel) else module


def model(name: str, module: nn.Module, optimizers: Iterable[Optimizer]) -> TrainedModel:
    """Return what is known of a module that is trained, with its tensors.

    Raises:
        CheckpointError: Its tensors have no names.
    """
    if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
        raise CheckpointError(
            f"{name} is spread by FullyShardedDataParallel, whose shards have no names.",
            do='spread it by nbdist.parallelize(model, "zero3") or fully_shard, or save it with '
            "torch.distributed.checkpoint.state_dict",
        )
    layout = layout_of(module)
    full_tensors.settle(module)
    saved = {clean(key) for key in torch_quantized.parts(module.state_dict())}
    every = full_tensors.names(module, duplicates=True)
    first: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for key, tensor in every.items():
        tidy = clean(key)
        if id(tensor) in first:
            aliases[tidy] = first[id(tensor)]
        elif tidy in saved and not tensor.is_meta:
            first[id(tensor)] = tidy
            tensors[tidy] = tensor
    if layout is not None and layout.skeleton is not None:
        aliases = {**_ties(layout.skeleton), **aliases}
    is_apart = _is_apart(module, layout, optimizers)
    buffers = {clean(key) for key, _ in module.named_buffers()} & tensors.keys()
    elsewhere = frozenset() if is_apart or _is_first(layout) else frozenset(buffers)
    return TrainedModel(name, module, layout, is_apart, tensors, aliases, elsewhere)


def _is_first(layout: Layout | None) -> bool:
    """Return whether this rank is the first of those that have the same part of the model."""
    if layout is None:
        return dist.get_rank() == 0
    axes, places = layout.mesh.mesh_dim_names, layout.mesh.get_coordinate()
    return all(axis == "pp" or not i for axis, i in zip(axes or (), places or (), strict=True))


def _ties(plain: nn.Module) -> dict[str, str]:
    """Return the other names of tied tensors, by name, as the plain model has them."""
    first: dict[int, str] = {}
    ties = {}
    for name, tensor in full_tensors.names(plain, duplicates=True).items():
        if first.setdefault(id(tensor), name) != name:
            ties[name] = first[id(tensor)]
    return ties


def _is_apart(module: nn.Module, layout: Layout | None, optimizers: Iterable[Optimizer]) -> bool:
    own = {id(p) for p in module.parameters()}
    holding = [o for o in optimizers if any(id(p) in own for p in parameters_of(o))]
    if any(isinstance(o, ApartWrapper) for o in holding):
        return dist.get_world_size() > 1
    if layout is not None or torch_modules.reducer_of(module) is not None:
        return False
    is_cut = any(isinstance(p, DTensor) for p in module.parameters())
    ddps = torch_modules.live_ddps()
    is_held = any(id(p) in own for ddp in ddps for p in ddp.parameters())
    return dist.get_world_size() > 1 and not (is_cut or is_held)
