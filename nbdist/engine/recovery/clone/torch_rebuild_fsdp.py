"""Private parts of torch for a new rank: modules under FSDP2 made again, with its own shards.

One of the modules for torch's private parts, see `torch_groups.py`. What FSDP2 puts on a module
(its class, states, groups of parameters, hooks) is Python, and travels with it but for what belongs
to a process: streams, gathered parameters, and this rank's place in a mesh. The new rank makes no
collective, as no wrapper of FSDP2 does. Tried with torch 2.13.0 (CPU): tests/cluster/test_peers.py.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nbdist.engine.compat.lacking import lacking
from nbdist.engine.recovery.clone.unpickler import afterwards

# What a forward has gathered, and a gradient that waits: made again by the next one.
_OF_A_STEP = (
    *("_unsharded_param", "_unsharded_inner_tensors", "_sharded_param_data"),
    *("_sharded_post_forward_param", "_sharded_post_forward_param_data"),
    "all_gather_outputs",
)
_AFTER_THE_REST = 1  # `order` of what needs whole parameters and registered states


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param, _fsdp_param_group

    broken = lacking(_fsdp_param.FSDPParam, ["reset_sharded_param"], "fully_shard's parameter")
    broken += lacking(
        _fsdp_param_group, ["FSDPCommContext", "FSDPParamGroup"], "fully_shard's groups"
    )
    broken += lacking(_fsdp_common, ["FSDPMeshInfo", "DDPMeshInfo"], "fully_shard's meshes")
    try:
        from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls  # noqa: F401
    except ImportError as error:
        broken.append(f"fully_shard's classes have moved: {error}")
    return [f"torch {torch.__version__}: {what}" for what in broken]


def anchors() -> dict[str, Any]:
    """Return, by keys that all ranks share, the functions by which torch finds FSDP2's states."""
    from torch.distributed.fsdp import fully_shard

    shard: Any = fully_shard
    found = {"torch.composable.fully_shard": shard.__wrapped__}
    with contextlib.suppress(ImportError):  # of torch before 2.13
        from torch.distributed._composable import replicate_with_fsdp

        replicate: Any = replicate_with_fsdp.replicate
        found["torch.composable.replicate_with_fsdp"] = replicate.__wrapped__
    return found


def reduce(value: Any) -> tuple[Any, ...] | None:
    """Reduce what FSDP2 has put on a module; None for anything else."""
    home = "torch.distributed.fsdp._fully_shard."
    kind = type(value)
    if isinstance(value, type):
        return _reduce_class(value)
    if isinstance(value, nn.Module):
        return _reduce_module(value)
    states = sys.modules.get(f"{home}_fsdp_state")
    if states is not None and isinstance(value, states.FSDPState):
        return _make_bare, (kind,), _state_of(value), None, None, _fill_state
    if not kind.__module__.startswith(home):
        return None
    recipe = _BY_NAME.get(kind.__name__)
    return None if recipe is None else recipe(value)


# ---- Classes and modules -----------------------------------------------------------------------


def _reduce_class(value: type) -> tuple[Any, ...] | None:
    """Reduce a class that torch made for a module it has wrapped to the module's own class."""
    home = sys.modules.get("torch.distributed.fsdp")
    if home is None or not issubclass(value, home.FSDPModule) or "__deepcopy__" not in vars(value):
        return None
    wrapper, plain = value.__bases__
    return make_class, (wrapper, plain)


def make_class(wrapper: type, plain: type) -> type:
    """Return the class for modules of class `plain` that torch has wrapped, its own if it has."""
    from torch.distributed.fsdp._fully_shard import _fully_shard

    is_replica = wrapper.__name__ == "ReplicateModule"
    known: dict[type, type] = _fully_shard.cls_to_fsdp_cls
    if is_replica:
        from torch.distributed._composable import replicate_with_fsdp

        known = replicate_with_fsdp.cls_to_replicate_cls
    if plain not in known:
        name = f"{'Replicate' if is_replica else 'FSDP'}{plain.__name__}"
        members = {"__deepcopy__": _fully_shard._unimplemented_deepcopy}
        known[plain] = type(name, (wrapper, plain), members)
    return known[plain]


def _reduce_module(module: nn.Module) -> tuple[Any, ...] | None:
    home = sys.modules.get("torch.distributed.fsdp")
    if home is None or not isinstance(module, home.FSDPModule):
        return None
    # Its class's own `__new__` would make a plain module.
    _, _, state = module.__reduce_ex__(2)[:3]
    return _make_bare, (type(module),), state


def _make_bare(kind: type) -> Any:
    return object.__new__(kind)


# ---- States, groups and parameters -------------------------------------------------------------


def _state_of(state: Any) -> tuple[dict[str, Any], list[nn.Module]]:
    from torch.distributed._composable_state import _module_state_mapping

    modules = [m for m, reference in list(_module_state_mapping.items()) if reference() is state]
    return dict(vars(state)), modules


def _fill_state(state: Any, contents: tuple[dict[str, Any], list[nn.Module]]) -> None:
    from torch.distributed._composable_state import _insert_module_state, _module_state_mapping

    attributes, modules = contents
    vars(state).update(attributes)

    def register() -> None:
        for module in modules:
            if module not in _module_state_mapping:
                _insert_module_state(module, state)

    afterwards(register)


def _reduce_attributes(value: Any) -> tuple[Any, ...]:
    return _make_bare, (type(value),), dict(vars(value)), None, None, _fill_attributes


def _fill_attributes(value: Any, attributes: dict[str, Any]) -> None:
    vars(value).update(attributes)


def _reduce_context(context: Any) -> tuple[Any, ...]:
    """A context of communication: its streams are the process's own."""
    name = "reduce_scatter_max_input_buffers"
    state = {name: getattr(context, name)} if hasattr(context, name) else {}
    is_begun = hasattr(context, "all_gather_stream")
    return _make_bare, (type(context),), (state, is_begun), None, None, _fill_context


def _fill_context(context: Any, contents: tuple[dict[str, Any], bool]) -> None:
    state, is_begun = contents
    if is_begun:
        context.lazy_init(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))
    vars(context).update(state)


def _reduce_group(group: Any) -> tuple[Any, ...]:
    state = dict(vars(group))
    for name in ("_all_gather_result", "_post_reduce_event", "_reshard_after_forward_event"):
        state[name] = None
    for name in ("_partial_reduce_output", "_all_reduce_state", "_all_reduce_hook_stream"):
        if name in state:
            state[name] = None
    return _make_bare, (type(group),), state, None, None, _fill_attributes


def _reduce_mesh_info(info: Any) -> tuple[Any, ...]:
    """A place in a mesh: the new rank's own."""
    return _make_bare, (type(info),), dict(vars(info)), None, None, _fill_mesh_info


def _fill_mesh_info(info: Any, state: dict[str, Any]) -> None:
    vars(info).update(state)
    # Meshes may not be whole yet.
    afterwards(info.__post_init__)


def _reduce_param(param: Any) -> tuple[Any, ...]:
    state = {name: value for name, value in vars(param).items() if name not in _OF_A_STEP}
    state |= {"all_gather_outputs": [], "_unsharded_inner_tensors": []}
    if "unsharded_accumulated_grad" in state:
        state["unsharded_accumulated_grad"] = None
    if "grad_offload_event" in state:
        state["grad_offload_event"] = None
    return _make_bare, (type(param),), state, None, None, _fill_param


def _fill_param(param: Any, state: dict[str, Any]) -> None:
    vars(param).update(state)

    def finish() -> None:
        from torch._prims_common import make_contiguous_strides_for

        local = param.sharded_param._local_tensor
        size, dim = list(param._orig_size), param.fsdp_placement.dim
        size[dim] = local.size(dim) if local.numel() else 0
        param.sharded_size = torch.Size(size)
        param.contiguous_sharded_stride = make_contiguous_strides_for(param.sharded_size)
        param._sharded_param_data = local.new_empty(0)
        param.reset_sharded_param()

    afterwards(finish, _AFTER_THE_REST)


_BY_NAME: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "FSDPStateContext": _reduce_attributes,
    "FSDPCommContext": _reduce_context,
    "FSDPParamGroup": _reduce_group,
    "FSDPParam": _reduce_param,
    "FSDPMeshInfo": _reduce_mesh_info,
    "DDPMeshInfo": _reduce_mesh_info,
    "HSDPMeshInfo": _reduce_mesh_info,
}
