"""Private parts of torch for a replacement: wrapped modules made again beside the living ones.

One of the modules for torch's private parts, see `torch_groups.py`. A module wrapped by DDP or by
composable `replicate` holds a reducer, C++ that no pickle carries. The new rank makes one without a
collective, while the living ranks keep theirs, with the buckets theirs have now: DDP gives up its
first buckets after one iteration, and other buckets mean another order of summation, or sizes that
do not fit. Tried with torch 2.13.0 (CPU): tests/group/test_clone.py.
"""

import pickle
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from nbdist.engine.compat import torch_modules, torch_pipeline, torch_reducers, torch_shards
from nbdist.engine.compat.groups import torch_groups
from nbdist.engine.compat.lacking import lacking
from nbdist.engine.recovery.clone import torch_rebuild_fsdp
from nbdist.engine.recovery.clone.unpickler import afterwards


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    from torch._C._distributed_c10d import Reducer

    broken = lacking(Reducer, ["_set_static_graph"], "the reducer")
    broken += lacking(RemovableHandle, ["next_id"], "torch's handles of hooks")
    broken += lacking(
        DistributedDataParallel, ["_build_params_for_reducer"], "DistributedDataParallel"
    )
    try:
        from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY  # noqa: F401
        from torch.distributed._composable.replicate import DDP, _ReplicateState  # noqa: F401
        from torch.distributed._composable_state import _module_state_mapping  # noqa: F401
    except ImportError as error:
        broken.append(f"torch's composable wrappers have moved: {error}")
    return [f"torch {torch.__version__}: {what}" for what in broken]


def anchors() -> dict[str, Any]:
    """Return, by keys that all ranks share, what each process has of its own in torch.

    The keys under which composable wrappers keep their states are made again in each interpreter,
    and the states are found by the function that torch's decorator hides.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    replicate: Any = torch_modules.composable_replicate()
    return {
        "torch.composable.state": STATE_KEY,
        "torch.composable.registry": REGISTRY_KEY,
        "torch.composable.replicate": replicate.__wrapped__,
        "nbdist.register_comm_hook": torch_modules.register_comm_hook,
        **torch_rebuild_fsdp.anchors(),
        **{
            f"process group {live.name} {live.ranks}": live.group
            for live in torch_groups.live_groups()
        },
    }


def hooks_counted() -> int:
    """Return the number that torch gives to the next hook of this process, of whatever object."""
    return int(RemovableHandle.next_id)


def count_hooks_from(number: int) -> None:
    """Give hooks numbers from this one on, where more have been counted elsewhere.

    A module travels with its hooks, by their numbers. A new hook of the same number would take the
    place of one of them, and its end would take both out.
    """
    RemovableHandle.next_id = max(RemovableHandle.next_id, number)


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def attributes_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what torch's own reduction of a tensor leaves out: gradient, hooks and attributes."""
    hooks = {name: getattr(tensor, name) for name in _HOOKS if getattr(tensor, name, None)}
    return tensor.grad, hooks, vars(tensor)


def fill_tensor(tensor: torch.Tensor, state: tuple[Any, ...]) -> None:
    """Give a tensor what `attributes_of` returned of another one."""
    tensor.grad, hooks, attributes = state
    vars(tensor).update(attributes)
    for name, functions in hooks.items():
        setattr(tensor, name, functions)


def is_sharded_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether each rank holds a part of the optimizer's states (ZeroRedundancyOptimizer)."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def is_sharded_module(value: object) -> bool:
    """Return whether ranks hold parts of a module: under FSDP2 or FSDP1, by tp, or in stages."""
    return isinstance(value, nn.Module) and (
        is_fsdp1(value)
        or _is_fsdp2(value)
        or is_staged(value)
        or any(torch_shards.is_cut(p) for p in value.parameters())
    )


def is_staged(module: nn.Module) -> bool:
    """Return whether a layout has cut a module into the stages of a pipeline."""
    return module in torch_pipeline.here.laid_models()


def is_of_a_stage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter of a stage."""
    return isinstance(tensor, nn.Parameter) and any(
        tensor is parameter
        for model in torch_pipeline.here.laid_models()
        for parameter in model.parameters()
    )


def holders(module: nn.Module) -> set[int]:
    """Return the global ranks that hold a part of a sharded module."""
    found = set(torch_pipeline.here.laid_models().get(module, ()))
    for parameter in module.parameters():
        if torch_shards.is_cut(parameter):
            mesh = parameter.device_mesh  # type: ignore[attr-defined]
            found.update(mesh.mesh.flatten().tolist())
    home = sys.modules.get("torch.distributed.fsdp")
    for part in module.modules():
        if home is not None and isinstance(part, home.FullyShardedDataParallel):
            found.update(torch_groups.ranks_of(part.process_group))
    return found


def is_fsdp1(module: nn.Module) -> bool:
    """Return whether a module is a FullyShardedDataParallel."""
    home = sys.modules.get("torch.distributed.fsdp")
    return home is not None and isinstance(module, home.FullyShardedDataParallel)


def _is_fsdp2(module: nn.Module) -> bool:
    home = sys.modules.get("torch.distributed.fsdp")
    return home is not None and isinstance(module, home.FSDPModule)


def reduce_mesh(mesh: Any) -> tuple[Any, ...]:
    """Reduce a DeviceMesh to its attributes and what this rank's group of each dim is."""
    state = dict(vars(mesh))
    state.pop("_pg_registry", None)
    live = {group.name: group for group in torch_groups.live_groups()}
    dims = [
        (name, live[name].ranks, live[name].group.group_desc) if name in live else (name, (), "")
        for name in state.get("_dim_group_names", ())
    ]
    return _make_mesh, (type(mesh),), (state, dims), None, None, _fill_mesh


def _make_mesh(kind: type) -> Any:
    return object.__new__(kind)


_Dim = tuple[str, tuple[int, ...], str]  # a dim's group elsewhere: name, ranks, description


def _fill_mesh(mesh: Any, contents: tuple[dict[str, Any], list[_Dim]]) -> None:
    """Give a DeviceMesh of a living rank this rank's place in it, and this rank's groups.

    Raises:
        LookupError: This rank is not in the mesh, or has no group of one of its dims.
    """
    state, dims = contents
    mesh.__dict__.update(state)
    mesh._rank = dist.get_rank()
    mesh._hash = None
    mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()
    mesh.__dict__.setdefault("_pg_registry", {})  # a part of it may have been here first
    if dims and mesh._coordinate_on_dim is None:
        raise LookupError("this rank is not in the mesh")
    if "_dim_group_names" in state:
        groups = [_own_group(mesh, dim, there) for dim, there in enumerate(dims)]
        mesh._dim_group_names = [live.name for live in groups]
        root = mesh._root_mesh or mesh
        registry = root.__dict__.setdefault("_pg_registry", {})
        registry.update({live.name: live.group for live in groups})


def _own_group(mesh: Any, dim: int, there: _Dim) -> torch_groups.LiveGroup:
    """Return this rank's group of a mesh's dim: the ranks that differ from it in that place only.

    Several groups may have these ranks. A mesh gives those of one dim the same description, and
    makes them one after the other in the order of their ranks.
    """
    name_there, ranks_there, description = there
    place = list(mesh._coordinate_on_dim)
    index: list[Any] = [*place[:dim], slice(None), *place[dim + 1 :]]
    ranks = tuple(mesh.mesh[tuple(index)].tolist())
    found = [live for live in torch_groups.live_groups() if live.ranks == ranks]
    if not found:
        raise LookupError(f"this rank has no process group of ranks {ranks}")

    def strangeness(live: torch_groups.LiveGroup) -> tuple[bool, bool, float]:
        is_other_kind = live.group.group_desc != description
        if live.name == name_there:
            return is_other_kind, False, -1
        if not (live.name.isdigit() and name_there.isdigit()):
            return is_other_kind, False, float("inf")
        apart = int(live.name) - int(name_there)
        return is_other_kind, (apart > 0) != (ranks > ranks_there), abs(apart)

    return min(found, key=strangeness)


# ---- DistributedDataParallel -----------------------------------------------------------------


def reduce_ddp(ddp: DistributedDataParallel) -> tuple[Any, ...]:
    """Reduce a DDP module to its attributes, its hooks and the buckets its reducer has now."""
    if ddp.mixed_precision is not None or ddp._delay_all_reduce_params:
        raise pickle.PicklingError("DDP with mixed_precision or delayed parameters cannot travel")
    if ddp._use_python_reducer:
        raise pickle.PicklingError("DDP with the Python reducer of torch.compile cannot travel")
    live = torch_modules.live_ddps()
    if ddp not in live:
        raise pickle.PicklingError("it belongs to a process group that no longer exists")
    state = dict(vars(ddp))
    for name in ("reducer", "logger"):
        del state[name]
    order = live.index(ddp)
    contents = (state, _buckets_of(ddp), torch_reducers.builtin_hook_of(ddp), order)
    return _make_module, (type(ddp),), contents, None, None, _fill_ddp


def restart_static_graphs(replacements: Iterable[int]) -> None:
    """Give static-graph modules a new reducer on this living rank, if a new rank shares them.

    A reducer learns the graph in its first iteration, with one collective more than in the others:
    a replacement rank's would meet none of ours. Buckets, hooks and the module stay what they are.
    """
    for ddp in torch_modules.live_ddps():
        members = torch_groups.ranks_of(ddp.process_group)
        if ddp.static_graph and not set(replacements).isdisjoint(members):
            torch_reducers.remake_reducer(ddp, _buckets_of(ddp))


def _buckets_of(ddp: DistributedDataParallel) -> torch_reducers.Buckets:
    if torch_reducers.is_to_be_remade(ddp):
        return []
    buckets = torch_reducers.buckets_of(ddp)
    if buckets is None:
        raise pickle.PicklingError("requires_grad of a parameter has changed since DDP was made")
    return buckets


def _make_module(kind: type[nn.Module]) -> Any:
    return object.__new__(kind)


def _fill_ddp(ddp: Any, contents: tuple[dict[str, Any], list[list[int]], str | None, int]) -> None:
    attributes, buckets, builtin, order = contents
    ddp.__dict__.update(attributes)

    def finish() -> None:
        if not isinstance(ddp.process_group, dist.ProcessGroup):
            raise LookupError("its process group is not on this rank: make both again")
        ddp._lazy_init_ran = False
        torch_reducers.build_reducer(ddp, builtin, buckets)
        if not buckets:  # on all ranks, which then compare what they train
            torch_reducers.forget_trained(ddp)
        torch_modules.remember_ddp(ddp)

    # Its parameters may not be whole yet; and ranks know their modules by the order of making.
    afterwards(finish, order)


# ---- Composable replicate and fully_shard ----------------------------------------------------


def reduce_replicated(value: Any) -> tuple[Any, ...] | None:
    """Reduce what composable `replicate` has put on a module: its class, itself, its state."""
    if isinstance(value, nn.Module):
        return _reduce_module(value)
    module = sys.modules.get("torch.distributed._composable.replicate")
    if module is None:
        return None
    if isinstance(value, type) and value.__bases__[:1] == (module.DDP,):
        has_hook = "register_comm_hook" in vars(value)
        return _make_replicated_class, (value.__bases__[1], has_hook)
    if isinstance(value, module._ReplicateState):
        return _make_module, (type(value),), _state_of(value), None, None, _fill_state
    return None


def _reduce_module(module: nn.Module) -> tuple[Any, ...] | None:
    replicate = sys.modules.get("torch.distributed._composable.replicate")
    if replicate is None or not isinstance(module, replicate.DDP):
        return None
    # Its class's own `__new__` would make a plain module.
    _, _, state = module.__reduce_ex__(2)[:3]
    return _make_module, (type(module),), state


def _make_replicated_class(plain: type[nn.Module], has_hook: bool) -> type:
    """Return a class as `replicate` makes one for each module it is applied to."""
    from torch.distributed._composable.replicate import DDP, unimplemented_deepcopy

    members: dict[str, Any] = {"__deepcopy__": unimplemented_deepcopy}
    if has_hook:
        members["register_comm_hook"] = torch_modules.register_comm_hook
    return type(f"DDP{plain.__name__}", (DDP, plain), members)


def _state_of(state: Any) -> tuple[dict[str, Any], list[nn.Module]]:
    from torch.distributed._composable_state import _module_state_mapping

    modules = [m for m, reference in list(_module_state_mapping.items()) if reference() is state]
    return dict(vars(state)), modules


def _fill_state(state: Any, contents: tuple[dict[str, Any], list[nn.Module]]) -> None:
    from torch.distributed._composable_state import _module_state_mapping

    attributes, modules = contents
    vars(state).update(attributes)

    def register() -> None:
        for module in modules:
            _module_state_mapping[module] = weakref.ref(state)

    afterwards(register)
