"""Private parts of torch around replicated modules: `replicate`, comm hooks, GradScaler.

One of the modules that hold what nbdist uses of torch's private parts; see `torch_groups.py`.
`check()` says what broke when a version moves. Tried with torch 2.13.0 and 2.15.0 (CPU).
"""

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbdist.engine.compat import torch_live
from nbdist.engine.compat.checkpoints import tensor_bytes
from nbdist.engine.compat.lacking import lacking

_dist: Any = dist  # for names that its types do not tell


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    return [f"torch {torch.__version__}: {what}" for what in _broken()]


def _broken() -> list[str]:
    broken = lacking(dist, ("_broadcast_coalesced",), "torch.distributed")
    broken += _broken_calls()
    if "_per_optimizer_states" not in vars(torch.amp.GradScaler("cpu")):
        broken.append("GradScaler._per_optimizer_states is gone")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    if turns_of(torch.optim.lr_scheduler.ConstantLR(optimizer)) is None:
        broken.append("LRScheduler._step_count is gone")
    try:
        from torch.distributed._composable.contract import _get_registry  # noqa: F401
        from torch.distributed._composable.replicate import _ReplicateState

        broken += lacking(composable_replicate(), ("state",), "composable replicate")
        if not {"has_initialized", "_param_list", "_param_names"} <= vars(_ReplicateState()).keys():
            broken.append("what composable replicate knows of its reducer has moved")
    except ImportError as error:
        broken.append(f"composable replicate has moved: {error}")
    return broken


def _broken_calls() -> list[str]:
    module = nn.Identity()
    with called_as(module, lambda given: call_itself(module, given) + 1):
        is_followed = module(1) == 2
    return [] if is_followed and module(1) == 1 else ["calls of a module do not go elsewhere"]


# ---- Resetting what a fault interrupted --------------------------------------------------------


def remember_ddp(module: DistributedDataParallel) -> None:
    """Count in a DDP that was made past its constructor."""
    torch_live.here.remember(DistributedDataParallel, module)


def live_ddps() -> list[DistributedDataParallel]:
    """Return the DDP modules that are still alive, also those that `replicate` makes."""
    return torch_live.here.live(DistributedDataParallel)


def kept_alike(module: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters, with their names, that a DDP means to keep equal on its ranks.

    None where a hook lets them part between averages (`PostLocalSGDState`).
    """
    if any(type(state).__name__ == "PostLocalSGDState" for _, state in comm_hooks_of(module)):
        return []
    wrapped = replicated_by(module) or module.module
    return [(n, p) for n, p in wrapped.named_parameters() if n not in module.parameters_to_ignore]


def has_comm_hooks(module: DistributedDataParallel) -> bool:
    """Return whether a module's gradients pass communication hooks."""
    return bool(module._comm_hooks)


def comm_hooks_of(module: DistributedDataParallel) -> list[tuple[Callable[..., Any], Any]]:
    """Return the communication hooks that a module's gradients pass, each as (hook, its state)."""
    return list(module._comm_hooks)


def reset_grad_scaler(scaler: torch.amp.GradScaler) -> bool:
    """Let a scaler forget which optimizers it has unscaled; returns whether there were any.

    A fault between `unscale_` and `update` leaves them, and the next `unscale_` would be refused.
    """
    if not scaler.is_enabled():
        return False  # torch gives it no states
    states: Any = scaler._per_optimizer_states
    had_some = bool(states)
    states.clear()
    return had_some


def scaler_tensors(scaler: torch.amp.GradScaler) -> list[torch.Tensor]:
    """Return what a scaler's state is kept in: its scale, and the steps since it has grown."""
    if not scaler.is_enabled():
        return []
    return [t for t in (scaler._scale, scaler._growth_tracker) if t is not None]


def overflows_of(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> list[torch.Tensor]:
    """Return what `unscale_` noted of an optimizer's gradients, a device each: 1.0 for infinite.

    Where this rank has no gradients, as with a stage of which nothing is trained, that is zero, and
    noted: torch asks for a note before it steps, and other ranks ask for it.
    """
    states: Any = scaler._per_optimizer_states
    found = states[id(optimizer)]["found_inf_per_device"]
    if not found:
        device = torch.device(scaler._device)
        found[device] = torch.zeros((), device=device)
    return list(found.values())


def is_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's gradients have been unscaled since the last `update`."""
    states: Any = scaler._per_optimizer_states
    return id(optimizer) in states and bool(states[id(optimizer)]["found_inf_per_device"])


def turns_of(scheduler: torch.optim.lr_scheduler.LRScheduler) -> tuple[int, int] | None:
    """Return how often a schedule has stepped, and where it stands; None where it does not tell.

    Of one that only counts where it stands (SequentialLR, ReduceLROnPlateau) that is both.
    """
    held = vars(scheduler)
    if "last_epoch" not in held:
        return None
    place = int(held["last_epoch"])
    return int(held.get("_step_count", place)), place


def schedules_in(scheduler: torch.optim.lr_scheduler.LRScheduler) -> list[Any]:
    """Return the schedules that another one holds: of SequentialLR, ChainedScheduler."""
    inner = getattr(scheduler, "_schedulers", None)
    return list(inner) if isinstance(inner, list | tuple) else []


def has_scaled(scaler: torch.amp.GradScaler) -> bool:
    """Return whether a scaler has ever scaled a loss: only then it makes its scale."""
    return scaler.is_enabled() and scaler._scale is not None


def has_unscaled(scaler: torch.amp.GradScaler) -> bool:
    """Return whether any optimizer's gradients have been unscaled since the last `update`."""
    states: Any = scaler._per_optimizer_states
    return any(state["found_inf_per_device"] for state in states.values())


# ---- Layouts: DDP's reducer behind hooks, and one broadcast for many tensors -------------------

_BROADCAST_BYTES = 32 << 20  # a bucket's size: what a broadcast needs as room beside the tensors


def replicate(
    module: nn.Module, group: dist.ProcessGroup, device_type: str, *, one_bucket: bool = False
) -> None:
    """Put DDP's reducer behind hooks of `module`, in place (composable `replicate`).

    torch builds the reducer at the first forward; we build it now, so that what is wrong shows
    here, and so that a first forward on one rank alone (a look at an output) waits for no other.
    With one bucket, all gradients are sent at once, when the last one is there. The weights must be
    equal on all ranks.
    """
    composable = composable_replicate()
    device = torch.device(device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    size = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    options: dict[str, Any] = {"bucket_cap_mb": size / 2**20 + 1} if one_bucket else {}
    # Weights are equal: sending them once more takes room for all, and quantized ones have no view.
    options["init_sync"] = False
    composable(module, process_group=group, device_id=device, **options)
    composable.state(module).lazy_init()
    # torch's own method keeps the hook for a reducer that is yet to come; here it has come. The
    # class was made for this module alone.
    made: Any = type(module)
    made.register_comm_hook = register_comm_hook


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` has wrapped, or the model itself.

    The wrapper calls it, with its hooks and whatever its forward has become since.
    """
    dynamo = sys.modules.get("torch._dynamo")  # long to import; without it nothing is compiled
    if dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        inner: nn.Module = model._orig_mod
        return inner
    return model


def is_compiled(model: nn.Module) -> bool:
    """Return whether `model.compile()` has compiled it in place."""
    return model._compiled_call_impl is not None


@contextmanager
def called_as(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Have calls of a module go to `call`, as those of a compiled one go to what is compiled.

    `call` may use `call_itself`.
    """
    held = vars(module)
    before = held.get("_compiled_call_impl")
    held["_compiled_call_impl"] = call
    try:
        yield
    finally:
        held["_compiled_call_impl"] = before


def call_itself(module: nn.Module, *args: Any, **keywords: Any) -> Any:
    """Call a module as it is written, with its hooks, wherever its calls go."""
    return module._call_impl(*args, **keywords)


@contextmanager
def as_written() -> Iterator[None]:
    """Run what `torch.compile` has compiled as it is written, and compile nothing."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def reducer_of(module: nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel that `replicate` keeps behind `module`, if any.

    None as well where a replacement rank got the module and a placeholder for its reducer.
    """
    from torch.distributed._composable.contract import _get_registry

    # Asked first: `state` leaves an empty entry in a module that has none.
    if "replicate" not in (_get_registry(module) or {}):
        return None
    reducer = getattr(composable_replicate().state(module), "_ddp", None)
    return reducer if isinstance(reducer, DistributedDataParallel) else None


def make_replicate_again() -> None:
    """Let `replicate` make its reducer in a later forward where the first one was broken off.

    It notes that it has begun before it does, and would make none. Once a process.
    """
    from torch.distributed._composable.replicate import _ReplicateState

    native: Any = _ReplicateState.init
    if getattr(native, "_nbdist_watches", False):
        return

    @functools.wraps(native)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            native(self, *args, **kwargs)
        except BaseException:
            self.has_initialized = False
            self._param_list, self._param_names = nn.ParameterList(), []
            raise

    init._nbdist_watches = True  # type: ignore[attr-defined]
    _ReplicateState.init = init  # type: ignore[method-assign]


class Replicated:
    """The modules behind which `replicate` keeps DDPs of a process, as far as they were found."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[DistributedDataParallel, ref[nn.Module]]
        self._found = WeakKeyDictionary()

    def find(self, ddp: DistributedDataParallel) -> nn.Module | None:
        """Return the one of this DDP; searched on the heap, once."""
        known = self._found.get(ddp)
        if known is None:
            holders = [
                h if isinstance(h, dict) else vars(h)
                for h in gc.get_referrers(ddp)
                if isinstance(h, dict) or hasattr(h, "__dict__")
            ]
            modules = [h["module"] for h in holders if h.get("_ddp") is ddp and "module" in h]
            if not modules:
                return None
            known = self._found[ddp] = ref(modules[0])
        return known()


def replicated_by(ddp: DistributedDataParallel) -> nn.Module | None:
    """Return the module behind which `replicate` keeps this DDP, if it does.

    The DDP itself knows a list of parameters only.
    """
    return here.find(ddp) if isinstance(ddp.module, nn.ParameterList) else None


def broadcast_coalesced(
    tensors: list[torch.Tensor], source: int, group: dist.ProcessGroup | None = None
) -> None:
    """Overwrite `tensors` with those of rank `source` of a group, in few collectives.

    The default group by itself; `source` counts in the group.

    What DDP uses for parameters and buffers; torch.distributed has no public form of it.
    """
    among = group or dist.group.WORLD
    assert among is not None, "parallelize has checked that there is a process group"
    # As bytes, where they lie in one piece: a broadcast carries one dtype, and gloo not every one.
    sent = [tensor_bytes.raw(t) if t.is_contiguous() else t for t in tensors]
    _dist._broadcast_coalesced(among, sent, _BROADCAST_BYTES, source)


def composable_replicate() -> Any:
    """Return torch's composable `replicate`."""
    from torch.distributed._composable.replicate import replicate as composable

    return composable


def register_comm_hook(module: nn.Module, state: object, hook: Callable[..., Any]) -> None:
    """Register a DDP communication hook, `hook(state, bucket) -> Future[Tensor]`."""
    ddp = reducer_of(module)
    assert ddp is not None, "only modules that have a reducer get this method"
    ddp.register_comm_hook(state, hook)


here = Replicated()
