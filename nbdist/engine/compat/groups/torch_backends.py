"""torch's private parts of the backends in a group: gloo on one device, new ones, ends of old ones.

`check()` says what broke when a version moves. Tried with torch 2.13.0 and 2.15.0: tests/group.
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

# Public as torch.distributed.Store, ...; its types say so only here.
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._C._distributed_c10d import _ProcessGroupWrapper

from nbdist.engine.compat.lacking import lacking


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    return [f"torch {torch.__version__}: {what}" for what in _broken()]


# ProcessGroup keeps its backends in a map by BackendType, an enum over one byte, and never
# replaces an entry. Two ways lead past that:
# - `release_backends` empties the map, and the old backend is freed with its threads;
# - a number that torch does not use (it uses 0 to 6) makes a new entry, and the devices then point
#   to it. The old backend stays, idle, and once used a number is gone for this group.
FIRST_SLOT = 10
LAST_SLOT = 255
_Gloo: Any = dist.ProcessGroupGloo


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """A process group this rank is a member of. `ranks` are global, in the group's order."""

    name: str
    ranks: tuple[int, ...]
    group: dist.ProcessGroup


def backends_of(group: dist.ProcessGroup) -> list[tuple[list[torch.device], Any]]:
    """Return the group's backends as (devices it serves, backend), in a fixed order."""
    found: list[tuple[list[torch.device], Any]] = []
    for device in sorted(group._device_types, key=lambda d: (d.type != "cpu", d.type)):
        backend = group._get_backend(device)
        for devices, known in found:
            if known is backend:
                devices.append(device)
                break
        else:
            found.append(([device], backend))
    return found


def default_backend() -> tuple[Any, torch.device]:
    """Return the default group's backend for raw bytes, and the device they must be on.

    Its `send` and `recv` go past the dispatcher, and so past the tap.
    """
    group = c10d._get_default_group()
    kinds = {device.type for device in group._device_types}
    device = torch.device("cpu" if "cpu" in kinds else "cuda")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return group._get_backend(device), device


def put_backend(
    group: dist.ProcessGroup, devices: Iterable[torch.device], slot: int, backend: Any
) -> None:
    """Let `backend` do the group's collectives on `devices`; the group stays the same object.

    The group's default backend must not be set to a slot of ours: `group.name()` would raise.
    """
    for device in devices:
        group._register_backend(device, dist.ProcessGroup.BackendType(slot), backend)


_ABORT_TAG = 0x6E626469  # of a message that no rank sends
_AT_ONCE = timedelta(milliseconds=1)


def break_backend(backend: Any) -> bool:
    """Make everything that waits in this backend raise, now and later. Any thread, 1 ms.

    gloo's own `abort` inherits a method that does nothing (torch 2.11 to 2.15). But when a receive
    runs out of time, gloo breaks all pairs of the backend, and whatever waits on one of them is
    told: so we wait for a message that no rank sends. Shutting the pairs' sockets is faster (1 ms,
    where gloo's event loop takes up to 10 ms to give up a pair) and fails one time in ten under
    DDP: a pair that holds half a message for a receive that has failed meanwhile never reads again.

    Returns:
        Whether the backend was whole before.
    """
    if isinstance(backend, _ProcessGroupWrapper):
        return break_backend(backend.wrapped_pg)
    if is_nccl(backend):
        backend.abort()
        return True
    if not isinstance(backend, _Gloo):
        return False
    for peer in range(backend.size()):
        if peer == backend.rank():
            continue
        try:
            backend.recv([torch.empty(1)], peer, _ABORT_TAG).wait(_AT_ONCE)
        except RuntimeError as error:
            # A pair that is broken already says so at once, and has told those who wait on it.
            if "Timed out" in str(error):
                return True
    return False


def end_receive(work: Any) -> None:
    """Let gloo's `wait` for a receive return False, now or when it is called. Any thread.

    A receive from any source waits on no pair, so `break_backend` does not reach it.
    """
    end = _torch_function(_END_RECEIVE)
    if end is not None and (address := _address_of(work, _WORK)) is not None:
        end(address)


def native_slot(backend: Any) -> int:
    """Return the number under which torch itself registers such a backend."""
    if isinstance(backend, _ProcessGroupWrapper):
        return native_slot(backend.wrapped_pg)
    kinds: Any = dist.ProcessGroup.BackendType
    return int(kinds.NCCL if is_nccl(backend) else kinds.GLOO)


def release_backends(group: dist.ProcessGroup) -> None:
    """Let the group forget its backends; it has none afterwards.

    Only after `can_release()`, and nothing may use the group meanwhile. Who still holds a backend
    decides when it goes: it waits for its queue first. The group's own store goes too, which
    nothing but symmetric memory asks for.
    """
    release = _release_function()
    assert release is not None, "the caller has asked can_release()"
    release(_address_of(group, _GROUP))


@functools.cache
def can_release() -> bool:
    """Return whether `release_backends` works with this torch; tries it on a group of its own."""
    if _release_function() is None:
        return False
    probe = dist.ProcessGroup(dist.HashStore(), 0, 1)
    if _address_of(probe, _GROUP) is None:
        return False
    release_backends(probe)
    return probe.get_group_store() is None


def _release_function() -> Callable[[int | None], None] | None:
    # ProcessGroup::release_resources, which C++ calls when the last reference is gone. ctypes gives
    # up Python's lock for the call: a backend's threads may need it to end.
    return _torch_function("_ZN4c10d12ProcessGroup17release_resourcesEv")


@functools.cache
def _torch_function(symbol: str) -> Callable[[int | None], None] | None:
    """Return a method of C++ that has no Python binding and takes nothing; None where it is not."""
    if (library := _torch_library()) is None or not hasattr(library, symbol):
        return None  # not this system's library, or a torch that has moved the function
    function = library[symbol]
    function.argtypes, function.restype = [ctypes.c_void_p], None
    return function


@functools.cache
def _torch_library() -> ctypes.CDLL | None:
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(folder / name))
    return None


_END_RECEIVE = "_ZN4c10d16ProcessGroupGloo8RecvWork5abortEv"
# Where C++ describes its classes (`std::type_info`).
_GROUP, _WORK = "_ZTIN4c10d12ProcessGroupE", "_ZTIN4c10d4WorkE"
# With what torch's pybind11 was built, on Linux and on macOS: its PYBIND11_PLATFORM_ABI_ID.
_ABIS = (b"system_libstdcpp_gxx_abi_1xxx_use_cxx11_abi_1", b"system_libcpp_abi1")
_TYPE_INFO = b"St9type_info"  # the name by which a capsule says that it holds one
_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))
_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _address_of(bound: Any, type_info: str) -> int | None:
    """Return the address of the C++ object behind one of Python's; None: torch is built otherwise.

    Args:
        bound: Of a class that torch has bound with pybind11. Good while this lives.
        type_info: `_GROUP` or `_WORK`.

    Source: pybind11's conduit for other bindings, include/pybind11/conduit/pybind11_conduit_v1.h.
    """
    library, conduit = _torch_library(), getattr(bound, "_pybind11_conduit_v1_", None)
    if library is None or conduit is None or not hasattr(library, type_info):
        return None
    info = ctypes.addressof(ctypes.c_char.in_dll(library, type_info))
    wanted = _new_capsule(info, _TYPE_INFO, None)
    for abi in _ABIS:
        found = conduit(abi, wanted, b"raw_pointer_ephemeral")
        if found is not None:
            return int(_pointer_in(found, type_info.removeprefix("_ZTI").encode()))
    return None


def make_gloo(
    store: Store, rank: int, size: int, timeout: timedelta, device: Any, threads: int
) -> Any:
    """Return a gloo backend whose pairs live on `device`. Waits for the group's other ranks."""
    return _Gloo(store, rank, size, _gloo_options(timeout, device, threads))


def _gloo_options(timeout: timedelta, device: Any, threads: int) -> Any:
    options = _Gloo._Options()
    options._devices = [device]
    options._threads = threads
    options._timeout = timeout
    return options


def use_gloo_device(
    device: Any,
    threads: int,
    making_timeout: Callable[[timedelta], timedelta],
    made: Callable[[], None],
) -> None:
    """Make every gloo backend that torch itself creates use `device` from here on.

    `new_group`, DeviceMesh and `init_process_group` all build their backend from one name in
    distributed_c10d. Without this each would open a listener of its own, on an interface that
    gloo guesses.

    Args:
        device: From `ProcessGroupGloo.create_device`.
        threads: Worker threads of each backend.
        making_timeout: Gives how long the making may take, from the timeout torch asked for.
        made: Called after each.
    """

    class OnDevice(_Gloo, metaclass=_CountsAsGloo):  # type: ignore[misc]
        def __init__(
            self,
            store: Store,
            rank: int,
            size: int,
            timeout: timedelta = c10d.default_pg_timeout,
            **asked: Any,  # of torch 2.15 `enable_reconfigure`
        ) -> None:
            limit = making_timeout(timeout)
            options = _gloo_options(limit, device, threads)
            for name, value in asked.items():
                setattr(options, name, value)
            super().__init__(store, rank, size, options)
            if limit != timeout:
                self._set_default_timeout(timeout)
            made()

    OnDevice.__name__ = OnDevice.__qualname__ = "ProcessGroupGloo"
    c10d.ProcessGroupGloo = OnDevice  # type: ignore[misc]


class _CountsAsGloo(type(_Gloo)):  # type: ignore[misc]
    """torch asks `isinstance(backend, ProcessGroupGloo)`, and gets backends from C++ as well."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Gloo)


def remake_backend(
    old: Any, store: Store, group: LiveGroup, rank: int, make_gloo: Callable[..., Any]
) -> Any:
    """Return a new backend like `old`, which has let go. Waits for the group's other ranks.

    Args:
        old: The group's backend so far.
        store: A place in the store that no backend has used.
        group: The group it is for.
        rank: This process's rank in the group.
        make_gloo: Called with (store, rank, size, timeout).

    Raises:
        NotImplementedError: A backend that cannot be made again.
    """
    size = len(group.ranks)
    if isinstance(old, _ProcessGroupWrapper):  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        inner = remake_backend(old.wrapped_pg, store, group, rank, make_gloo)
        return c10d._create_process_group_wrapper(inner, group.name, store, rank, size)
    if isinstance(old, _Gloo):
        new = make_gloo(store, rank, size, old.options._timeout)
    elif is_nccl(old):
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = old.options._timeout
        options.is_high_priority_stream = old.options.is_high_priority_stream
        options.config = old.options.config
        options.global_ranks_in_group = list(group.ranks)
        options.group_name = group.name
        new = dist.ProcessGroupNCCL(store, rank, size, options)
    else:
        raise NotImplementedError(f"the {old.name()} backend cannot be made again")
    new.options.global_ranks_in_group = list(group.ranks)
    new.options.group_name = group.name
    if not torch.__version__ >= "2.15":  # from then on it does nothing, and warns
        new._set_sequence_number_for_group()
    return new


def is_nccl(backend: Any) -> bool:
    """Return whether a backend is NCCL's; also on a torch built without NCCL."""
    return dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL)


def _broken() -> list[str]:
    broken = lacking(
        dist.ProcessGroup, ["_register_backend", "_get_backend", "_device_types"], "ProcessGroup"
    )
    broken += lacking(_Gloo, ["_Options", "create_device", "_set_default_timeout"], "gloo")
    broken += lacking(_Gloo._Options(), ["_devices", "_threads", "_timeout"], "gloo's options")
    try:
        dist.ProcessGroup.BackendType(LAST_SLOT)
    except (TypeError, ValueError) as error:
        broken.append(f"BackendType takes no number of ours: {error}")
    if not can_release():
        broken.append("ProcessGroup::release_resources cannot be called: old backends stay")
    if _torch_function(_END_RECEIVE) is None or not hasattr(_torch_library(), _WORK):
        broken.append("RecvWork::abort cannot be called: receives from any source cannot be freed")
    return broken
