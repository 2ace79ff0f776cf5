"""What a training is made of on this rank, found without lists: models, optimizers, all else.

A model is what a living optimizer trains, or what `nbdist.keep` names; its tensors go by the names
of the plain model, so that any layout reads them. It is *apart* where ranks train models of their
own (no layout, no DDP, local SGD): then each rank's is saved by itself. Main thread.
"""

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from nbdist.engine.compat import torch_live, torch_modules, torch_sharded
from nbdist.engine.data import position
from nbdist.engine.data.position import Standing
from nbdist.engine.layout.layout import Layout, layout_of, live_layouts
from nbdist.engine.layout.weights import full_tensors
from nbdist.engine.steps import keep, step_state
from nbdist.engine.steps.optimizer_wrapper import ApartWrapper, Wrapper
from nbdist.errors import CheckpointError
from nbdist.formatting import counted

Optimizer = torch.optim.Optimizer

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass
class TrainedModel:
    """One model of a training.

    Attributes:
        name: Of its class, and a number where there are several.
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


@dataclass
class Training:
    """All that a training needs to go on.

    Attributes:
        models: In the order of making.
        optimizers: Likewise, without those inside others.
        schedulers: Likewise.
        scalers: GradScalers that are switched on.
        kept: What `nbdist.keep` names, but modules.
        loaders: Of every living `nbdist.loader`, in the order of making.
    """

    models: list[TrainedModel]
    optimizers: list[Optimizer]
    schedulers: list[Any]
    scalers: list[Any]
    kept: dict[str, Any]
    loaders: list[Standing]
    names: dict[int, str] = field(default_factory=dict)  # "GPT.head.weight", by id of parameters

    @property
    def step(self) -> int:
        """Steps of the optimizer that has made most."""
        counts = step_state.here().steps
        return max((counts[o].whole for o in self.optimizers if o in counts), default=0)


def find() -> Training:
    """Return the training of this rank.

    Raises:
        CheckpointError: There is nothing to save, or something that cannot be.
    """
    found = _find()
    if len({type(m.module) for m in found.models}) < len(found.models):
        gc.collect()  # an older one that only a cycle keeps is no part of it
        found = _find()
    if not found.models:
        raise CheckpointError(
            "There is no training here: no optimizer trains a model, and nbdist.keep names none.",
            do="build model and optimizer first, or name what there is: nbdist.keep(model=model)",
        )
    return found


def _find() -> Training:
    optimizers = _optimizers()
    modules = _modules(optimizers)
    counts: dict[str, int] = {}
    models = []
    for module in modules:
        kind = torch_sharded.plain_name(module)
        counts[kind] = counts.get(kind, 0) + 1
        name = kind if counts[kind] == 1 else f"{kind}-{counts[kind]}"
        models.append(_model(name, module, optimizers))
    names = {
        id(tensor): f"{model.name}.{name}"
        for model in models
        for name, tensor in model.tensors.items()
    }
    inner = {id(o) for o in optimizers} | {id(real(o)) for o in optimizers}
    return Training(
        models,
        optimizers,
        [s for s in _schedulers() if id(getattr(s, "optimizer", None)) in inner],
        [s for s in torch_live.live(torch.amp.GradScaler) if s.is_enabled()],
        {n: v for n, v in keep.kept().items() if not isinstance(v, nn.Module | Optimizer)},
        position.in_order(),
        names,
    )


# ---- Models -------------------------------------------------------------------------------------


def clean(name: str) -> str:
    """Return a tensor's name without what torch's wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _modules(optimizers: Iterable[Optimizer]) -> list[nn.Module]:
    """Return the outermost modules that are trained or kept, in the order of making."""
    trained = {id(p) for o in optimizers for p in parameters_of(o)}
    kept = [_plain(v) for v in keep.kept().values() if isinstance(v, nn.Module)]
    candidates = [layout.model for layout in live_layouts()]
    candidates += [torch_modules.replicated_by(d) or _plain(d) for d in torch_modules.live_ddps()]
    candidates += [module for module, _ in torch_sharded.live_fsdp2_roots()]
    candidates += [_plain(v) for v in keep.named().values() if isinstance(v, nn.Module)]
    unique = {id(m): m for m in candidates}
    found = [m for m in unique.values() if any(id(p) in trained for p in m.parameters())]
    found += [m for m in kept if all(m is not other for other in found)]
    inside = {id(part) for m in found for part in m.modules() if part is not m}
    return [m for m in found if id(m) not in inside]


def _plain(module: nn.Module) -> nn.Module:
    module = torch_modules.uncompiled(module)
    return module.module if isinstance(module, DistributedDataParallel) else module


def _model(name: str, module: nn.Module, optimizers: Iterable[Optimizer]) -> TrainedModel:
    if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
        raise CheckpointError(
            f"{name} is spread by FullyShardedDataParallel, whose shards have no names.",
            do='spread it by nbdist.parallelize(model, "zero3") or fully_shard, or save it with '
            "torch.distributed.checkpoint.state_dict",
        )
    layout = layout_of(module)
    full_tensors.settle(module)
    saved = {clean(key) for key in module.state_dict()}
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


# ---- Optimizers and what follows them -----------------------------------------------------------


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def real(optimizer: Optimizer) -> Any:
    """Return the optimizer that holds the state: the one inside of another."""
    inner = getattr(optimizer, "optim", None)  # of ZeroRedundancyOptimizer and wrappers
    return inner if isinstance(inner, Optimizer) else optimizer


def _has_inner(optimizer: Optimizer) -> bool:
    return real(optimizer) is not optimizer


def _optimizers() -> list[Optimizer]:
    """Return the living optimizers in the order of making; of one parameter, the newest."""
    living = torch_live.live(Optimizer)
    inner = {id(real(o)) for o in living if _has_inner(o)}
    held: set[int] = set()
    found = []
    for optimizer in reversed([o for o in living if id(o) not in inner]):
        its = {id(p) for p in parameters_of(optimizer)}
        if not its <= held:
            found.append(optimizer)
            held |= its
    return found[::-1]


def _schedulers() -> list[Any]:
    found = {id(s): s for s in torch_live.live(LRScheduler)}
    found |= {id(s): s for s in keep.named().values() if isinstance(s, LRScheduler)}
    return list(found.values())


def options(training: Training) -> list[dict[str, Any]]:
    """Return each optimizer's class and groups: the options, and names of the parameters."""
    return [
        {
            "class": type(real(optimizer)).__name__,
            "groups": [
                {
                    "names": [training.names.get(id(p), "") for p in group["params"]],
                    "options": {k: _plain_number(v) for k, v in group.items() if k != "params"},
                }
                for group in optimizer.param_groups
            ],
        }
        for optimizer in training.optimizers
    ]


def _plain_number(value: Any) -> Any:
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1
    return value.item() if is_number else value


def states(
    training: Training,
) -> tuple[dict[str, dict[str, dict[str, torch.Tensor]]], dict[str, dict[str, dict[str, Any]]]]:
    """Return the optimizers' states, tensors and all else: by optimizer, parameter, state's name.

    Raises:
        CheckpointError: A state has no place in the whole.
    """
    tensors: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    others: dict[str, dict[str, dict[str, Any]]] = {}
    for number, optimizer in enumerate(training.optimizers):
        of_one, rest = tensors.setdefault(str(number), {}), others.setdefault(str(number), {})
        for parameter, state in real(optimizer).state.items():
            name = training.names.get(id(parameter))
            if name is None:
                continue
            of_one[name] = {
                key: _as_parameter(value, parameter, f"{name}'s {key}")
                for key, value in state.items()
                if isinstance(value, torch.Tensor)
            }
            plain = {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
            if plain:
                rest[name] = plain
    return tensors, others


def _as_parameter(state: torch.Tensor, parameter: Any, what: str) -> torch.Tensor:
    """Return a state as a part of the whole, as its parameter is one."""
    if isinstance(state, DTensor) or not isinstance(parameter, DTensor) or state.numel() == 1:
        return state
    if state.shape == parameter.to_local().shape:
        return like(state, parameter)
    raise CheckpointError(
        f"{what} of {tuple(state.shape)} is of a shard, and it is unknown of which part of the "
        "whole.",
        why="its optimizer keeps plain tensors beside parameters that are cut over ranks",
        do='use the layout "ddp" with this optimizer',
    )


def like(local: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """Return a tensor that is cut as `parameter` is, of which this rank has `local`."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def tree(training: Training, rank: int) -> dict[str, Any]:
    """Return all tensors of the training as nested dicts.

    What ranks train apart, or only one of them remembers, stands below `apart` and the rank.
    """
    apart = {model.name for model in training.models if model.is_apart}
    shared: dict[str, Any] = {"model": {}, "optim": {}}
    own: dict[str, Any] = {"model": {}, "optim": {}}
    for model in training.models:
        place = own if model.is_apart else shared
        place["model"][model.name] = model.saved
    for optimizer, of_one in states(training)[0].items():
        for name, state in of_one.items():
            place = own if name.partition(".")[0] in apart else shared
            place["optim"].setdefault(optimizer, {})[name] = state
    for number, one in enumerate(training.optimizers):
        if isinstance(one, Wrapper) and (kept := wrapper_tensors(one)):
            own.setdefault("wrapper", {})[str(number)] = kept
    if apart or "wrapper" in own:
        shared["apart"] = {str(rank): own}
    return shared


def wrapper_tensors(wrapper: Wrapper) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors that a wrapper itself remembers: by what they are, and their number."""
    return {
        key: {str(i): tensor.detach() for i, tensor in enumerate(value)}
        for key, value in wrapper.own_state().items()
        if _is_tensors(value)
    }


def wrapper_values(wrapper: Wrapper) -> dict[str, Any]:
    """Return all else that it remembers."""
    return {k: v for k, v in wrapper.own_state().items() if not _is_tensors(v)}


def _is_tensors(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(one, torch.Tensor) for one in value)


def describe(training: Training) -> str:
    """Return what was found, in words."""
    models = ", ".join(f"{m.name} ({m.spread_as})" for m in training.models)
    parts = [
        models,
        *(
            counted(len(found), word)
            for found, word in (
                (training.optimizers, "optimizer"),
                (training.schedulers, "scheduler"),
                (training.scalers, "scaler"),
                (training.loaders, "loader"),
                (training.kept, "kept object"),
            )
            if found
        ),
    ]
    return ", ".join(parts)


def layouts(training: Training) -> Mapping[str, str]:
    """Return how each model is spread, by its name."""
    return {model.name: model.spread_as for model in training.models}
