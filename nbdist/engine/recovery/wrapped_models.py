"""Find this rank's *units*: each wrapped model with the optimizers that hold its parameters.

Only wrapped models are units: ranks that train on their own differ rightfully, and are never
compared. *Replicated* is DDP, also behind composable `replicate`; *sharded* is an optimizer whose
parameters are DTensors (FSDP2, tensor parallel), shards of FSDP1 or a pipeline stage's, or whose
state is cut over the ranks (ZeroRedundancyOptimizer). *Apart* is a plain module under an optimizer
that averages models now and then (local SGD): a wrapper of ours, over the default group.

Main thread. Nothing is searched on the heap but pipelines, where they are used.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbdist.engine.compat import (
    torch_live,
    torch_modules,
    torch_pipeline,
    torch_sharded,
    torch_shards,
)
from nbdist.engine.compat.groups import torch_groups
from nbdist.engine.group import identity
from nbdist.engine.recovery.clone import torch_rebuild_zero
from nbdist.engine.recovery.decide import LONG_AGO_S, Kind, ModelReport, Steps
from nbdist.engine.steps import keep, step_state
from nbdist.engine.steps.optimizer_wrapper import ApartWrapper

Optimizer = torch.optim.Optimizer
Ranks = tuple[int, ...]  # global
_Part = tuple[nn.Module, Ranks]  # of a pipeline, and the ranks that train it


@dataclass
class Unit:
    """One wrapped model on this rank.

    Attributes:
        kind: Replicated, sharded or apart.
        name: For people.
        ranks: Global ranks that train it together.
        parameters: In an order that is the same on all of them.
        modules: The modules that are called: the wrapper, or the module under it.
        optimizers: Those that hold its parameters, the newest first.
        identity: Its name, the same on all these ranks (`identity`).
        model: The name of the replicated model that it trains, if it trains one.
        is_alike: Whether parameters have the same shapes on all ranks: not in pipelines.
        is_cut_in_states_only: Whether each rank has all parameters (ZeroRedundancyOptimizer).
        copies: Of a sharded one, the ranks that hold the same part of it as this one does.
    """

    kind: Kind
    name: str
    ranks: tuple[int, ...]
    parameters: list[torch.Tensor]
    modules: list[nn.Module]
    optimizers: list[Optimizer]
    identity: str
    model: str = ""
    is_alike: bool = True
    is_cut_in_states_only: bool = False
    copies: Ranks = ()

    @property
    def can_be_restored(self) -> bool:
        """Whether a replacement rank can be given a part of it that lies in a peer's memory."""
        if self.is_cut_in_states_only:
            return all(map(torch_rebuild_zero.is_plain, self.optimizers))
        return self.kind == "sharded" and self.is_alike and bool(self.copies)

    @property
    def fixed(self) -> list[torch.Tensor]:
        """What of its modules is cut and not trained, as a frozen model beside adapters."""
        trained = {id(p) for o in torch_live.here.live(Optimizer) for p in parameters_of(o)}
        found = {id(p): p for module in self.modules for p in module.parameters()}
        return [p for p in found.values() if id(p) not in trained and torch_shards.is_cut(p)]

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of its modules, each once."""
        found = {
            id(buffer): (f"{i}.{name}", buffer)
            for i, module in enumerate(self.modules)
            for name, buffer in module.named_buffers()
            if buffer.numel()
        }
        return dict(found.values())

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of its optimizers, in the order of `steps`."""
        return tuple(identity.here.of(one, is_alike=self.is_alike) for one in self.optimizers)

    def steps(self) -> Steps:
        """Return how many steps its optimizers have made."""
        counts = step_state.here().steps
        return tuple(counts[o].whole if o in counts else 0 for o in self.optimizers)

    def settle(self, parts: Sequence[str], steps: Steps) -> None:
        """Count as all ranks do now: so many steps of the optimizers with these names."""
        made = dict(zip(parts, steps, strict=False))
        for optimizer, part in zip(self.optimizers, self.parts, strict=False):
            if part in made:
                step_state.here().steps.setdefault(optimizer, step_state.OptimizerSteps()).settle(
                    made[part]
                )

    def report(
        self,
        snapshots: Iterable[tuple[Steps, float]] = (),
        turns: Iterable[int] = (),
        *,
        is_settled: bool = False,
        is_told: bool = False,
    ) -> ModelReport:
        """Return what the other ranks need to know of it."""
        counts = step_state.here().steps
        active = [o for o in self.optimizers if o in counts and not step_state.here().is_idle(o)]
        last = max((counts[o].at for o in active), default=-math.inf)
        return ModelReport(
            kind=self.kind,
            name=self.name,
            ranks=self.ranks,
            identity=self.identity,
            steps=self.steps(),
            parts=self.parts,
            model=self.model,
            is_torn=any(o in counts and counts[o].is_torn(o) for o in self.optimizers),
            is_settled=is_settled,
            is_told=is_told,
            snapshots=tuple(snapshots),
            turns=tuple(turns),
            is_alike=self.is_alike,
            copies=self.copies,
            idle_s=min(time.monotonic() - last, LONG_AGO_S),
        )


def find() -> list[Unit]:
    """Return the units of this rank, in the order in which they were made."""
    optimizers = _optimizers()
    named = keep.here.named()
    parts = torch_pipeline.live_parts()
    sharded = {id(o): kind for o in optimizers if (kind := _sharding(o, parts))}
    called = _called(named, parts)
    units = [_sharded_unit(o, *sharded[id(o)], called) for o in optimizers if id(o) in sharded]
    for ddp in torch_modules.live_ddps():
        unit = _replicated_unit(ddp, optimizers)
        if unit is not None and not any(id(o) in sharded for o in unit.optimizers):
            units.append(unit)
    for optimizer in optimizers:
        if isinstance(optimizer, ApartWrapper):
            units.append(_apart_unit(optimizer))
    return units


def hand_over() -> dict[str, tuple[Any, identity.Names]]:
    """Return what a new rank may get a copy of, with the names by which all ranks know it."""
    trained = [optimizer for unit in find() for optimizer in unit.optimizers]
    return identity.here.hand_over([*torch_modules.live_ddps(), *trained])


def unit_of(optimizer: Optimizer) -> Unit | None:
    """Return the unit that an optimizer trains, if any."""
    return next((u for u in find() if any(o is optimizer for o in u.optimizers)), None)


def untrained_cut() -> list[nn.Module]:
    """Return the modules that are cut over ranks and belong to no unit of this rank."""
    called = _called(keep.here.named(), torch_pipeline.live_parts())
    trained = {id(module) for unit in find() for module in unit.modules}
    return [
        module
        for module in {id(m): m for m in called}.values()
        if id(module) not in trained and any(map(torch_shards.is_cut, module.parameters()))
    ]


def buffers_of(optimizer: Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers of the unit that an optimizer trains, by name."""
    unit = unit_of(optimizer)
    return [] if unit is None else [(name, local(b)) for name, b in unit.buffers.items()]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what of a tensor lies on this rank: a DTensor's shard, or the tensor itself."""
    part = getattr(tensor, "_local_tensor", tensor)
    assert isinstance(part, torch.Tensor)
    return part


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _optimizers() -> list[Optimizer]:
    """Return the living optimizers in the order of making, without those inside others."""
    inner = {id(getattr(o, "optim", None)) for o in torch_live.here.live(Optimizer)}
    return [o for o in torch_live.here.live(Optimizer) if id(o) not in inner]


def _called(named: dict[str, Any], parts: list[_Part]) -> list[nn.Module]:
    """Return the modules that may be called: where a refusal can stand, and buffers lie."""
    found = [module for module, _ in torch_sharded.live_fsdp2_roots()]
    found += [module for module, _ in parts]
    found += torch_sharded.live_fsdp1()
    found += [torch_modules.replicated_by(ddp) or ddp for ddp in torch_modules.live_ddps()]
    return found + [value for value in named.values() if isinstance(value, nn.Module)]


def _sharding(optimizer: Optimizer, parts: list[_Part]) -> tuple[tuple[int, ...], bool] | None:
    """Return (ranks, is_alike) of an optimizer whose state no other rank has; None if not so."""
    parameters = parameters_of(optimizer)
    wanted = {id(p) for p in parameters}
    # Before the meshes of its shards, which are those of one stage.
    for module, its_ranks in parts:
        if any(id(p) in wanted for p in module.parameters()):
            return tuple(sorted(its_ranks)), False
    meshes = {id(m): m for p in parameters if (m := getattr(p, "device_mesh", None)) is not None}
    if meshes:
        ranks = {int(rank) for mesh in meshes.values() for rank in mesh.mesh.flatten()}
        return (tuple(sorted(ranks)), True) if len(ranks) > 1 else None
    if _is_cut_in_states_only(optimizer):
        return _ranks(optimizer.process_group), True  # type: ignore[attr-defined]
    for fsdp1 in torch_sharded.live_fsdp1():
        if any(id(p) in wanted for p in fsdp1.parameters()):
            return _ranks(fsdp1.process_group), False
    return None


def _sharded_unit(
    optimizer: Optimizer, ranks: tuple[int, ...], is_alike: bool, called: list[nn.Module]
) -> Unit:
    parameters = parameters_of(optimizer)
    wanted = {id(p) for p in parameters}
    modules = {id(m): m for m in called if any(id(p) in wanted for p in m.parameters())}
    name = _name(next(iter(modules.values()))) if modules else f"the model of {_kind(optimizer)}"
    states_only = _is_cut_in_states_only(optimizer)
    ddps = [d for d in torch_modules.live_ddps() if any(id(p) in wanted for p in d.parameters())]
    return Unit(
        "sharded",
        f"the optimizer of {name}" if states_only else name,
        ranks,
        parameters,
        list(modules.values()),
        [optimizer],
        identity.here.of(optimizer, is_alike=is_alike),
        identity.here.of(ddps[-1]) if ddps else identity.UNKNOWN,
        is_alike=is_alike,
        is_cut_in_states_only=states_only,
        copies=_copies(parameters, modules.values()),
    )


def _copies(parameters: Iterable[torch.Tensor], modules: Iterable[nn.Module]) -> Ranks:
    """Return the ranks that hold the same parts as this one, itself among them; () if unknown."""
    staged = torch_pipeline.here.laid_models()
    for module in modules:
        if module in staged:
            return tuple(sorted(torch_pipeline.here.copies_of(module, dist.get_rank())))
    cut = [p for p in parameters if torch_shards.is_cut(p)]
    return tuple(sorted(torch_shards.common_copies(cut, dist.get_rank())))


def _apart_unit(optimizer: ApartWrapper) -> Unit:
    modules = optimizer.modules
    name = _name(modules[0]) if modules else f"the model of {_kind(optimizer.optim)}"
    ranks = tuple(range(dist.get_world_size()))
    its = identity.here.of(optimizer)
    return Unit("apart", name, ranks, optimizer.parameters(), modules, [optimizer], its)


def _is_cut_in_states_only(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is a ZeroRedundancyOptimizer."""
    return isinstance(getattr(optimizer, "process_group", None), dist.ProcessGroup)


def _replicated_unit(ddp: DistributedDataParallel, optimizers: list[Optimizer]) -> Unit | None:
    ranks = _ranks(ddp.process_group)
    if not ranks:
        return None  # its group is gone: no rank can train it
    parameters: list[torch.Tensor] = list(ddp.parameters())
    wanted = {id(p) for p in parameters}
    mine = [o for o in reversed(optimizers) if any(id(p) in wanted for p in parameters_of(o))]
    module = torch_modules.replicated_by(ddp) or ddp
    its = identity.here.of(ddp)
    return Unit("replicated", _name(module), ranks, parameters, [module], mine, its, its)


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(sorted(torch_groups.ranks_of(group)))


def _name(module: nn.Module) -> str:
    """Return the name of the class the user wrote: torch's wrappers put one of theirs before it."""
    if isinstance(module, DistributedDataParallel):
        module = module.module
    return torch_sharded.plain_name(module)


def _kind(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
