"""How objects of torch, and our own, travel to a replacement: recipes for the clone's pickler.

A recipe gets an object and returns a reduction as of `__reduce__`, or None when the object is none
of its business. What torch ties to a process (groups, reducers, the table of composable states) is
made again on the other side by `torch_rebuild`, without a collective.

Main thread only.
"""

import os
import pickle
import types
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nbdist.engine.compat import torch_live
from nbdist.engine.data.loaders import Loop
from nbdist.engine.recovery.clone import torch_rebuild
from nbdist.engine.recovery.clone.pickler import Recipe
from nbdist.engine.recovery.clone.shards import Shards
from nbdist.engine.recovery.clone.unpickler import afterwards


def recipes(source: int, replacement: int) -> list[Recipe]:
    """Return the recipes for one dump; they remember which storages it has met.

    Args:
        source: This rank.
        replacement: The rank that the dump is for.
    """
    return [
        Shards(source, replacement).reduce,
        _recipe_by_type,
        _Storages().reduce,
        torch_rebuild.reduce_replicated,
        _reduce_shared,
        _reduce_placed,
    ]


def _recipe_by_type(value: Any) -> tuple[Any, ...] | None:
    for kind in type(value).__mro__[:-1]:
        recipe = _BY_TYPE.get(kind)
        if recipe is not None:
            return recipe(value)
    return None


# ---- Tensors: one storage travels once -------------------------------------------------------


class _Storages:
    """Reduces storages to raw buffers; a tensor's own reduction leads here.

    Each look at a tensor's storage may make a new Python object, so that the pickler's memo would
    not see that two tensors share one: we know them by the C++ object behind.
    """

    def __init__(self) -> None:
        self._known: dict[int, torch.UntypedStorage] = {}

    def reduce(self, value: Any) -> tuple[Any, ...] | None:
        if isinstance(value, torch.storage.TypedStorage):
            untyped = value._untyped_storage
            first = self._known.setdefault(untyped._cdata, untyped)
            return _make_typed, (first, value.dtype)
        if isinstance(value, torch.UntypedStorage):
            self._known.setdefault(value._cdata, value)
            flat = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value)
            bytes_: Any = flat.cpu().numpy()
            raw = pickle.PickleBuffer(bytes_)
            return make_storage, (raw, value.nbytes(), value.device)
        return None


def make_storage(raw: Any, size_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a storage with these bytes on a device; torch's own memory where `raw` is that."""
    owner = getattr(raw, "owner", None)
    if isinstance(owner, torch.Tensor) and owner.untyped_storage().nbytes() == size_bytes:
        flat = owner
    else:
        # Memory from elsewhere could be neither resized nor counted on to be aligned.
        flat = torch.empty(size_bytes, dtype=torch.uint8)
        if size_bytes:
            flat.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    return flat.to(device).untyped_storage()


def _make_typed(untyped: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Torch's own reduction, with the gradient and the hooks that it leaves out."""
    if not tensor.is_leaf:
        return tensor.detach().__reduce_ex__(2)  # type: ignore[no-any-return]
    state = torch_rebuild.attributes_of(tensor)
    if tensor.grad is None and not state[1]:
        return tensor.__reduce_ex__(2)  # type: ignore[no-any-return]
    bare = tensor.detach()
    kind = type(tensor) if isinstance(tensor, nn.Parameter) else None
    fill = torch_rebuild.fill_tensor
    return _make_leaf, (bare, tensor.requires_grad, kind), state, None, None, fill


def _make_leaf(bare: torch.Tensor, requires_grad: bool, kind: type[nn.Parameter] | None) -> Any:
    return bare.requires_grad_(requires_grad) if kind is None else kind(bare, requires_grad)


def _reduce_device(device: torch.device) -> tuple[Any, ...] | None:
    """A rank's own GPU becomes the replacement rank's own; any other device stays what it is."""
    if device.type == "cuda" and device.index == torch.cuda.current_device():
        return own_device, ()
    return None


def own_device() -> torch.device:
    """Return this rank's GPU."""
    return torch.device("cuda", torch.cuda.current_device())


# ---- Training: optimizers, scalers, loaders --------------------------------------------------


def make_bare(kind: type) -> Any:
    """Return an object of a class without calling anything of it."""
    return object.__new__(kind)


def _reduce_optimizer(optimizer: torch.optim.Optimizer) -> tuple[Any, ...] | None:
    """The whole optimizer: its own way drops the step hooks and what a scheduler has put on it."""
    if type(optimizer).__getstate__ is not torch.optim.Optimizer.__getstate__:
        return None
    if not torch_live.here.number_of(torch.optim.Optimizer, optimizer):
        # It only looks like one (Fabric's), and steps another: its steps are not counted here.
        return make_bare, (type(optimizer),), vars(optimizer), None, None, _fill_attributes
    return _make_optimizer, (type(optimizer),), vars(optimizer)


def _make_optimizer(kind: type[torch.optim.Optimizer]) -> Any:
    optimizer: Any = object.__new__(kind)
    # Before anything refers to the class's `step`: torch replaces it by one that runs hooks.
    optimizer._patch_step_function()
    torch_live.here.remember(torch.optim.Optimizer, optimizer)
    return optimizer


def _reduce_scheduler(scheduler: LRScheduler) -> tuple[Any, ...] | None:
    """A scheduler that is counted on this rank is counted on the new rank, named or not."""
    if not torch_live.here.number_of(LRScheduler, scheduler):
        return None
    if type(scheduler).__getstate__ is not object.__getstate__:
        return None
    return make_bare, (type(scheduler),), vars(scheduler), None, None, _fill_scheduler


def _fill_scheduler(scheduler: LRScheduler, state: dict[str, Any]) -> None:
    vars(scheduler).update(state)
    torch_live.here.remember(LRScheduler, scheduler)


def _reduce_scaler(scaler: Any) -> tuple[Any, ...]:
    """A GradScaler between two steps: what it noted of a step that did not end is dropped."""
    fresh: defaultdict[int, Any] = defaultdict(torch.amp.grad_scaler._refresh_per_optimizer_state)
    state = {**vars(scaler), "_per_optimizer_states": fresh}
    return make_bare, (type(scaler),), state, None, None, _fill_scaler


def _fill_scaler(scaler: torch.amp.GradScaler, state: dict[str, Any]) -> None:
    vars(scaler).update(state)
    torch_live.here.remember(torch.amp.GradScaler, scaler)


def _reduce_dataloader(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """A DataLoader without the workers of a loop that runs."""
    state = {**vars(loader), "_iterator": None}
    return make_bare, (type(loader),), state, None, None, _fill_attributes


def _fill_attributes(made: Any, state: dict[str, Any]) -> None:
    vars(made).update(state)


# What says which of how many processes something belongs to: torch's DistributedSampler and those
# that have taken over its names, and all of Accelerate.
_PLACES = (("rank", "num_replicas"), ("process_index", "num_processes"))
OWN_PLACES = {"rank", "process_index", "local_process_index"}  # what differs between ranks in these


def stands_at_own_rank(value: Any) -> bool:
    """Return whether a sampler, or a library's state, says that it is this rank's.

    Known by its attributes: a place, and that there are as many as there are ranks.
    """
    return _own_place(value) is not None


def _own_place(value: Any) -> str | None:
    """Return the attribute in which a value keeps this rank's number, if it has one."""
    own = getattr(value, "__dict__", None)
    if type(own) is not dict or isinstance(value, types.ModuleType) or not dist.is_initialized():
        return None
    here = (dist.get_rank(), dist.get_world_size())
    return next((place for place, size in _PLACES if (own.get(place), own.get(size)) == here), None)


def _reduce_placed(value: Any) -> tuple[Any, ...] | None:
    """A replacement rank's sampler takes the replacement rank's part."""
    if not stands_at_own_rank(value):
        return None
    reduction = value.__reduce_ex__(5)
    if isinstance(reduction, str):
        return None
    function, args, state, items, pairs, set_state = (*reduction, *(None,) * 4)[:6]
    if type(state) is not dict or set_state is not None:
        return None
    return function, args, state, items, pairs, _fill_placed


def _fill_placed(value: Any, state: dict[str, Any]) -> None:
    if hasattr(value, "__setstate__"):
        value.__setstate__(state)
    else:
        vars(value).update(state)
    _take_own_place(value)


def _take_own_place(value: Any) -> None:
    """Write this rank's number where another one's was."""
    own = vars(value)
    for place, size in _PLACES:
        if place in own and own.get(size) == dist.get_world_size():
            own[place] = dist.get_rank()
    if "local_process_index" in own:
        own["local_process_index"] = int(os.environ.get("LOCAL_RANK", "0"))


def _reduce_shared(value: Any) -> tuple[Any, ...] | None:
    """A replacement rank's class shares its attributes with all its objects, as the source's does.

    A "Borg": all states of Accelerate are such objects, made here and there, and hold one dict.
    """
    own = getattr(value, "__dict__", None)
    if type(own) is not dict or own is not getattr(type(value), "_shared_state", None):
        return None
    return make_shared, (type(value),), own, None, None, _fill_shared


def make_shared(kind: Any) -> Any:
    """Return an object of a class whose objects have one dict of attributes together."""
    made = object.__new__(kind)
    made.__dict__ = kind._shared_state
    return made


def _fill_shared(value: Any, state: dict[str, Any]) -> None:
    vars(value).update(state)
    _take_own_place(value)


def _refuse_loop(_loop: Any) -> tuple[Any, ...]:
    raise pickle.PicklingError(
        "a loop over a loader belongs to its process; the loader itself goes on where it stood"
    )


# ---- Python ----------------------------------------------------------------------------------


def _reduce_weakref(reference: "weakref.ref[Any]") -> tuple[Any, ...]:
    target = reference()
    if target is None:
        raise pickle.PicklingError("what it refers to is gone")
    return _make_weakref, (target,)


def _make_weakref(target: Any) -> "weakref.ref[Any]":
    _keep_until_loaded(target)
    return weakref.ref(target)


def _keep_until_loaded(target: Any) -> None:
    """Hold what so far only a weak reference knows: its owner is yet to come in the stream."""
    afterwards(lambda held=target: None)  # type: ignore[misc]


def _refuse_work(_work: Any) -> tuple[Any, ...]:
    raise pickle.PicklingError("it is an operation of the process group that was")


def _refuse_group(_group: Any) -> tuple[Any, ...]:
    # Those that are alive are anchors, see `clone`.
    raise pickle.PicklingError("this process group no longer exists")


_BY_TYPE: dict[type, Callable[[Any], tuple[Any, ...] | None]] = {
    torch.Tensor: _reduce_tensor,
    torch.device: _reduce_device,
    torch.optim.Optimizer: _reduce_optimizer,
    LRScheduler: _reduce_scheduler,
    torch.amp.GradScaler: _reduce_scaler,
    DataLoader: _reduce_dataloader,
    Loop: _refuse_loop,
    weakref.ref: _reduce_weakref,
    dist.device_mesh.DeviceMesh: torch_rebuild.reduce_mesh,
    dist.ProcessGroup: _refuse_group,
    dist.Work: _refuse_work,
    nn.parallel.DistributedDataParallel: torch_rebuild.reduce_ddp,
}
