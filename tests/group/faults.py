"""What ranks run in the tests of faults: calls that block, groups, looks at the process."""

import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from nbdist.engine.compat import torch_modules, torch_pipeline, torch_reducers, torch_sharded
from nbdist.engine.compat.groups import torch_groups
from nbdist.engine.group import group, state
from nbdist.engine.recovery import reset

held: dict[str, Any] = {}  # what a rank keeps from one posted function to the next


# ---- Waiting ---------------------------------------------------------------------------------


def wait_in(what: str) -> dict[str, Any]:
    """Block in a call that the last rank never makes; return what the error was."""
    held["waits"] = True
    try:
        _WAITS[what]()
    except BaseException as error:
        return {
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


def abort(generation: int | None = None) -> int:
    """Let go; returns how many connections were cut."""
    return group.abort(generation)


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


_WAITING_FILES = (
    "torch/distributed/distributed_c10d.py",
    "nbdist/engine/tap/interruptible_store.py",
)


def reform(generation: int) -> dict[str, Any]:
    """Re-form, heal, and check with an all_reduce over the world that it works."""
    start = time.monotonic()
    result = group.reform(generation)
    result["seconds"] = time.monotonic() - start
    result["healed"] = reset.reset_state()
    return result


def heal_replacement() -> list[str]:
    """Heal where the others do: ranks tell each other of their reducers."""
    return reset.reset_state()


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
    return state.here.status()


def what_broke() -> list[str]:
    """Return what the modules for torch's private parts miss in this torch."""
    modules = (torch_groups, torch_modules, torch_reducers, torch_sharded, torch_pipeline)
    return [line for module in modules for line in module.check()]


def initialise_again() -> float:
    """Destroy the default group and initialise it by `env://`, as some programs do."""
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    return sum_of_ranks()
