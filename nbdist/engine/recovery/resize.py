"""Go on when the groups are no more: join new ones; what can follow does, all else is refused.

A changed size means new groups: a module, mesh or group of the old ones would wait for ranks that
are not there, or leave some out. Models that `parallelize` has spread with dp alone follow, with
the same object, optimizer and buckets. All else that stands on the old groups is named, and raises
when it is used.

    all ranks: leave ─▶ (processes come and go) ─▶ boot.join, with `follow` ─▶ clone for new ranks

Main thread only.
"""

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nbdist.engine.averaging import serving
from nbdist.engine.compat import torch_live, torch_modules, torch_sharded
from nbdist.engine.compat.groups import torch_groups
from nbdist.engine.group import group
from nbdist.engine.layout.layout import Layout, layout_of, live_layouts
from nbdist.engine.recovery import disabled
from nbdist.shared.errors import ClusterError

_SCALED = "%dist scale has changed the number of ranks; only layouts with dp alone follow."
_DESTROYED = "the program destroyed it; only layouts with dp alone follow to the one formed since."


class StaleNames:
    """What was named before, by its id: what it stands on is gone for long."""

    def __init__(self) -> None:
        self._named: WeakValueDictionary[int, Any] = WeakValueDictionary()

    def find(self, user_ns: Mapping[str, Any], stale: set[int]) -> dict[str, str]:
        """Return what a person calls what cannot be used any more, each with its kind."""
        found = {}
        for name, value in user_ns.items():
            kind = _kind(value, stale)
            if kind and not name.startswith("_") and id(value) not in self._named:
                self._named[id(value)] = value
                found[name] = kind
        return found


def leave(user_ns: Mapping[str, Any]) -> dict[str, Any]:
    """Leave all groups, and refuse what cannot follow. Harmless when there are none.

    Args:
        user_ns: The names of the cells, to call things by.

    Returns:
        `groups`: how many this process has made; `stale`: what cannot be used any more, by name
        and kind; `models`: those of it that are models; `sharded`: models of which each rank had
        a part.
    """
    stale = _stale_modules()
    serving.here.stop()
    named = here.find(user_ns, {id(module) for module in stale})
    models = {name: user_ns[name] for name in named if isinstance(user_ns[name], nn.Module)}
    parts = {id(module) for module in torch_sharded.live_sharded()}
    sharded = [name for name, model in models.items() if _is_sharded(model, parts)]
    _refuse(stale, _SCALED, "create it again, from a plain model.")
    kinds = [f"{name} ({kind})" for name, kind in named.items()]
    return {"groups": group.leave(), "stale": kinds, "models": list(models), "sharded": sharded}


def after_destroy(*, is_anew: bool) -> None:
    """Refuse what stands on groups that the program has destroyed. After `group.reform`.

    Args:
        is_anew: Whether no group that this rank had lives on.
    """
    stale = [module for module in _stale_modules() if is_anew or _is_orphan(module)]
    _refuse(stale, _DESTROYED, "wrap the model inside it again.")
    follow()


def follow() -> None:
    """Attach the layouts that can follow to the new default group. After `group.join`."""
    for layout in live_layouts():
        reducer = torch_modules.reducer_of(layout.model) if layout.can_follow else None
        if reducer is not None and reducer.process_group is not dist.group.WORLD:
            layout.follow()


def _stale_modules() -> list[nn.Module]:
    """Return the modules that stand on groups and cannot follow."""
    following = {id(torch_modules.reducer_of(x.model)) for x in live_layouts() if x.can_follow}
    return [
        *torch_sharded.live_sharded(),
        *(layout.model for layout in live_layouts() if not layout.can_follow),
        *(ddp for ddp in torch_modules.live_ddps() if id(ddp) not in following),
    ]


def _is_orphan(module: nn.Module) -> bool:
    """Return whether torch has no books any more of the group that `module` works in."""
    if isinstance(module, DistributedDataParallel):
        home = module.process_group
    else:
        home = torch_sharded.group_of(module)
    return home is not None and not torch_groups.ranks_of(home)


def _refuse(stale: list[nn.Module], why: str, do: str) -> None:
    for module in stale:
        disabled.here.refuse(module, _refusal(module, why, do))
        torch_live.here.forget(module)
    _forget_optimizers(stale)


def _forget_optimizers(stale: list[nn.Module]) -> None:
    """Let recoveries leave the optimizers alone whose parameters are in stale modules."""
    parameters = {id(p) for module in stale for p in module.parameters()}
    for optimizer in torch_live.here.live(Optimizer):
        if any(id(p) in parameters for group in optimizer.param_groups for p in group["params"]):
            torch_live.here.forget(optimizer)


def _is_sharded(model: nn.Module, parts: set[int]) -> bool:
    """Return whether each rank holds only a part of a model, by the ids of torch's wrappers."""
    return layout_of(model) is not None or any(id(module) in parts for module in model.modules())


def _kind(value: object, stale: set[int]) -> str:
    """Return what `value` is, in a word, if it stands on groups and cannot follow; else nothing."""
    if isinstance(value, dist.ProcessGroup):
        return "process group"
    if isinstance(value, DeviceMesh):
        return "mesh"
    if isinstance(value, nn.Module):
        layout = layout_of(value)
        if layout is None:
            is_stale = any(id(module) in stale for module in value.modules())
            return type(value).__name__ if is_stale else ""
        value = layout
    if isinstance(value, Layout) and not value.can_follow:
        return f'layout "{value.name}"'
    return ""


def _refusal(module: nn.Module, why: str, do: str) -> ClusterError:
    layout = layout_of(module)
    name = type(module).__name__ if layout is None else f'model with the layout "{layout.name}"'
    return ClusterError(
        f"This {name} belongs to a process group that no longer exists.",
        why=why,
        do=do,
    )


here = StaleNames()
