"""Private parts of torch inside wrapped modules: DDP's reducer, FSDP2's states, `replicate`.

The second of the files that make the room for torch's private parts; see `torch_compat.py`.
`check()` says what broke when a version moves. Tried with torch 2.13.0 (CPU): DDP's
`reducer._reset_state`; FSDP2's own `_reset_iter_state`, and ours for 2.11, which lacks it.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbdist.engine.torch_compat import lacking


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    return [f"torch {torch.__version__}: {what}" for what in _broken()]


def _broken() -> list[str]:
    from torch._C._distributed_c10d import Reducer

    broken = lacking(Reducer, ["_reset_state"], "DDP's reducer")
    broken += lacking(dist, ("_broadcast_coalesced",), "torch.distributed")
    try:
        from torch.distributed._composable.contract import _get_registry  # noqa: F401

        broken += lacking(_composable_replicate(), ("state",), "composable replicate")
    except ImportError as error:
        broken.append(f"composable replicate has moved: {error}")
    return broken


# ---- Wrapped modules: seeing them, and resetting what a fault interrupted ----------------------

_ddps: "WeakSet[DistributedDataParallel]" = WeakSet()


def watch_ddp() -> None:
    """Remember every DDP made from here on, also those that composable `replicate` makes."""
    native = DistributedDataParallel.__init__
    if getattr(native, "_nbdist_watches", False):
        return

    @functools.wraps(native)
    def __init__(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        native(self, *args, **kwargs)
        _ddps.add(self)

    __init__._nbdist_watches = True  # type: ignore[attr-defined]
    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]


def live_ddps() -> list[DistributedDataParallel]:
    """Return the DDP modules that are still alive."""
    return list(_ddps)


def reset_ddp(module: DistributedDataParallel) -> None:
    """Let the reducer forget a backward that did not end."""
    module.reducer._reset_state()


def live_fsdp_roots() -> list[tuple[nn.Module, Any]]:
    """Return (module, state) of each live FSDP2 root that has run at least one forward.

    torch keeps a weak table of the modules under its composable wrappers; nothing of ours has to
    be in place before the module is made. Other states of a root are reached through it.
    """
    composable = sys.modules.get("torch.distributed._composable_state")
    table = composable._module_state_mapping if composable else {}
    roots: dict[int, tuple[nn.Module, Any]] = {}
    for module, reference in list(table.items()):
        state = reference()
        if hasattr(state, "_state_ctx") and state._is_root:
            roots[id(state)] = (module, state)
    return list(roots.values())


def reset_fsdp(state: Any) -> None:
    """Let an FSDP2 root and all states under it forget an iteration that did not end."""
    for group in _fsdp_param_groups(state):
        # torch's own reset waits for this gather, whose failure would be raised once more.
        group._all_gather_result = None
    if hasattr(state, "_reset_iter_state"):
        state._reset_iter_state()
    else:
        _reset_fsdp_by_hand(state)
    for group in _fsdp_param_groups(state):
        for param in group.fsdp_params:
            # A gradient that autograd had written and no reduction had taken away: the next
            # backward would add to it.
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


def _fsdp_param_groups(root: Any) -> list[Any]:
    return [g for state in root._state_ctx.all_states for g in _groups_of_state(state)]


def _groups_of_state(state: Any) -> list[Any]:
    # torch 2.11 has at most one a state.
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def _reset_fsdp_by_hand(root: Any) -> None:
    """What `_reset_iter_state` of torch 2.13 does, for 2.11, which lacks it."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    context = root._comm_ctx
    context.all_gather_state = None
    context.post_forward_order.clear()
    if hasattr(context, "reduce_scatter_state"):
        context.reduce_scatter_state = None
    for name in ("reduce_scatter_states", "_last_post_reduce_events"):
        getattr(context, name, {}).clear()
    for state in root._state_ctx.all_states:
        state._training_state = TrainingState.IDLE
        getattr(state, "_modules_to_run_forward", set()).clear()
        for group in _groups_of_state(state):
            for name in (
                "_all_gather_result",
                "_post_reduce_event",
                "_all_reduce_state",
                "_reshard_after_forward_event",
                "_partial_reduce_output",
            ):
                if hasattr(group, name):
                    setattr(group, name, None)
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


# ---- Layouts: DDP's reducer behind hooks, and one broadcast for many tensors -------------------

_BROADCAST_BYTES = 32 << 20  # a bucket's size: what a broadcast needs as room beside the tensors


def replicate(module: nn.Module, group: dist.ProcessGroup, device_type: str) -> None:
    """Put DDP's reducer behind hooks of `module`, in place (composable `replicate`).

    torch builds the reducer at the first forward; we build it now, so that what is wrong shows
    here, and so that a first forward on one rank alone (a look at an output) waits for nobody.
    """
    composable = _composable_replicate()
    device = torch.device(device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    composable(module, process_group=group, device_id=device)
    composable.state(module).lazy_init()
    # torch's own method keeps the hook for a reducer that is yet to come; here it has come. The
    # class was made for this module alone.
    made: Any = type(module)
    made.register_comm_hook = _register_comm_hook


def reducer_of(module: nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel that `replicate` keeps behind `module`, if any."""
    from torch.distributed._composable.contract import _get_registry

    # Asked first: `state` leaves an empty entry in a module that has none.
    if "replicate" not in (_get_registry(module) or {}):
        return None
    return getattr(_composable_replicate().state(module), "_ddp", None)


def broadcast_coalesced(tensors: list[torch.Tensor], source: int) -> None:
    """Overwrite `tensors` with those of rank `source` of the default group, in few collectives.

    What DDP uses for parameters and buffers; torch.distributed has no public form of it.
    """
    from torch._C._distributed_c10d import _broadcast_coalesced

    world = dist.group.WORLD
    assert world is not None, "parallelize has checked that there is a process group"
    _broadcast_coalesced(world, tensors, _BROADCAST_BYTES, source)


def _composable_replicate() -> Any:
    from torch.distributed._composable.replicate import replicate as composable

    return composable


def _register_comm_hook(module: nn.Module, state: object, hook: Callable[..., Any]) -> None:
    """Register a DDP communication hook, `hook(state, bucket) -> Future[Tensor]`."""
    ddp = reducer_of(module)
    assert ddp is not None, "only modules that have a reducer get this method"
    ddp.register_comm_hook(state, hook)
