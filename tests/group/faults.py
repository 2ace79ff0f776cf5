"""What ranks run in the tests of faults: blocking calls, and training that can be broken."""

import hashlib
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from nbdist.engine import group, heal, torch_compat, torch_modules

held: dict[str, Any] = {}  # what a rank keeps from one posted function to the next


# ---- Waiting ---------------------------------------------------------------------------------


def wait_in(what: str) -> dict[str, Any]:
    """Block in a call that the last rank never makes; return what the error was, and when."""
    held["waits"] = True
    try:
        _WAITS[what]()
    except BaseException as error:
        return {
            "at": time.monotonic(),
            "type": type(error).__name__,
            "text": str(error),
            "released": group.was_released(error),
        }
    return {"text": "no error"}


def _async_all_reduce() -> None:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    assert work is not None
    work.wait()


_WAITS = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
    "async all_reduce": _async_all_reduce,
    "barrier": dist.barrier,
    "recv": lambda: dist.recv(torch.ones(4), src=dist.get_world_size() - 1),
    "broadcast": lambda: dist.broadcast(torch.ones(4), src=dist.get_world_size() - 1),
    "all_gather_object": lambda: dist.all_gather_object([None] * dist.get_world_size(), "x"),
    "monitored_barrier": dist.monitored_barrier,
    "new_group": lambda: dist.new_group(list(range(dist.get_world_size()))),
}


def abort(generation: int | None = None) -> tuple[float, int]:
    """Let go; returns when that was asked, and how many connections were cut."""
    at = time.monotonic()
    return at, group.abort(generation)


def main_is_blocked() -> bool:
    """Return whether the main thread is inside a call that waits for other ranks."""
    main = threading.main_thread().ident
    assert main is not None
    frame = sys._current_frames().get(main)
    while frame is not None:
        code = frame.f_code
        if code is _async_all_reduce.__code__ or code.co_filename.endswith(_WAITING_FILES):
            return True
        frame = frame.f_back
    return False


_WAITING_FILES = ("torch/distributed/distributed_c10d.py", "nbdist/engine/patient_store.py")


def reform(generation: int) -> dict[str, Any]:
    """Re-form, heal, and check with an all_reduce over the world that it works."""
    start = time.monotonic()
    result = group.reform(generation)
    result["seconds"] = time.monotonic() - start
    result["healed"] = heal.heal()
    return result


def reform_in(generation: int, timeout_s: float) -> None:
    """Re-form, waiting for the others no longer than this."""
    group.reform(generation, timeout_s)


def sum_of_ranks(name: str | None = None) -> float:
    """Return the sum of global ranks over a group, the default one or one that is held."""
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value, group=held[name] if name else None)
    return float(value)


def make_group(name: str, ranks: list[int]) -> None:
    """Make a sub-group on every rank and hold it under a name."""
    held[name] = dist.new_group(ranks)


def usage() -> dict[str, int]:
    """Return this process's open descriptors and threads."""
    import psutil

    process = psutil.Process()
    return {
        "fds": process.num_fds(),
        "threads": process.num_threads(),
        "rss": process.memory_info().rss,
    }


# ---- Training --------------------------------------------------------------------------------


class Boom(Exception):
    """The fault that a test wants."""


class Trip(nn.Module):
    """Passes its input on, and raises where and when it is armed."""

    armed = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Trip.armed == "forward":
            raise Boom("in forward")
        return _TripBackward.apply(x)  # type: ignore[no-any-return]


class _TripBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Trip.armed == "backward":
            raise Boom("in backward")
        return gradient


WIDTH = 32


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        if i == 1:
            layers.append(Trip())
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def build(kind: str) -> None:
    """Make the model and optimizer that `train` uses."""
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel as DDP

    model: nn.Module = _mlp()
    if kind == "ddp":
        model = DDP(model, bucket_cap_mb=0.004)
    elif kind == "ddp on a new_group":
        model = DDP(model, bucket_cap_mb=0.004, process_group=dist.new_group())
    elif kind == "replicate":
        replicate(model, bucket_cap_mb=0.004)
    elif kind.startswith("fsdp"):
        if kind == "fsdp by hand":
            _forget_reset_iter_state()
        for layer in list(model.children()):
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    held["model"], held["step"] = model, 0
    held["optimizer"] = torch.optim.Adam(model.parameters(), lr=1e-2)


def _forget_reset_iter_state() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    if hasattr(FSDPState, "_reset_iter_state"):
        del FSDPState._reset_iter_state


def train(until: int, break_at: int = -1, place: str = "") -> dict[str, Any]:
    """Train up to a step; rank 1 raises at `break_at`, in `place`."""
    while held["step"] < until:
        i = held["step"]
        try:
            if i == break_at:
                # Nobody fails before all have ended the step before: one may else lose it.
                dist.barrier()
                Trip.armed = place if dist.get_rank() == 1 else ""
            _step(i)
        except Exception as error:
            Trip.armed = ""
            if isinstance(error, Boom):
                group.abort()
            elif not group.was_released(error):
                raise
            return {"step": i, "error": type(error).__name__, "at": time.monotonic()}
        held["step"] = i + 1
    return {"step": held["step"], "error": None}


def _step(i: int) -> None:
    generator = torch.Generator().manual_seed(1000 * i + dist.get_rank())
    x, y = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
    held["optimizer"].zero_grad()
    F.mse_loss(held["model"](x), y).backward()
    held["optimizer"].step()


def fingerprint() -> str:
    """Return a hash of all parameters, bit by bit."""
    digest = hashlib.sha1()
    for parameter in held["model"].parameters():
        tensor = parameter.detach()
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


# ---- Sockets ---------------------------------------------------------------------------------


def listening_hosts() -> list[str]:
    """Return the addresses on which this process listens."""
    import psutil

    return [
        c.laddr.ip
        for c in psutil.Process(os.getpid()).net_connections(kind="inet")
        if c.status == psutil.CONN_LISTEN
    ]


def status() -> dict[str, Any]:
    """Return the group's status."""
    return group.status()


def what_broke() -> list[str]:
    """Return what the room for torch's private parts misses in this torch."""
    return [*torch_compat.check(), *torch_modules.check()]


def initialise_again() -> float:
    """Destroy the default group and initialise it by `env://`, as some programs do."""
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    return sum_of_ranks()
