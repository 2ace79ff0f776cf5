"""How the default process group comes to be: `init_process_group`, `env://`, and what torch keeps.

A rank has its group before any cell runs, and scripts begin by making one. A private part of torch
is touched: `_rendezvous_handlers`. Tried with torch 2.13.0 and 2.15.0 (CPU):
tests/cluster/test_scripts.py. Main thread only.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.rendezvous import _rendezvous_handlers

from nbdist.engine.compat import torch_sharded
from nbdist.engine.compat.groups.torch_groups import Store
from nbdist.engine.compat.lacking import lacking


@dataclass(frozen=True, slots=True)
class InitArguments:
    """What a call of `init_process_group` asks for; None is what it leaves open.

    Attributes:
        backends: Names of backends, such as gloo and nccl.
        rank: This process's rank.
        world_size: Number of ranks.
        timeout: Longest wait inside one collective.
    """

    backends: frozenset[str] | None = None
    rank: int | None = None
    world_size: int | None = None
    timeout: timedelta | None = None


def backends_in(backend: str) -> frozenset[str]:
    """Return the names in what `init_process_group` takes: `gloo`, or `cpu:gloo,cuda:nccl`."""
    return frozenset(part.split(":")[-1].strip().lower() for part in backend.split(","))


def take_as_done(agree: Callable[[InitArguments], None]) -> None:
    """Let `init_process_group` be taken as done where there is a default group already.

    Args:
        agree: Gets what a program asks for; raises where this rank's group is another.
    """
    native = _native_init
    signature = inspect.signature(native)

    @functools.wraps(native)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            forget_names()
            native(*args, **kwargs)
            return
        agree(_asked(**signature.bind(*args, **kwargs).arguments))

    modules: tuple[Any, ...] = (dist, c10d)
    for module in modules:
        module.init_process_group = init_process_group


def _asked(
    backend: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    **_: Any,
) -> InitArguments:
    return InitArguments(
        None if backend is None else backends_in(backend),
        None if rank < 0 else rank,
        None if world_size < 0 else world_size,
        timeout,
    )


_native_init: Callable[..., None] = dist.init_process_group

EnvRendezvous = Callable[[InitArguments], tuple[Store, int, int] | None]


def answer_env_rendezvous(answer: EnvRendezvous) -> None:
    """Take over `env://`: who destroys the default group may initialise it again.

    torch's own answer would reuse the keys of the group that was destroyed, and connect to
    sockets that no longer exist; or, where the script has set MASTER_PORT, wait for a server that
    no rank hosts.

    Args:
        answer: Gets rank and world size where the call names them. Returns (store, rank, world
            size), or None to leave it to torch: the program means a group of its own.
    """
    native = _native_env_rendezvous

    def handler(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
        query = parse_qs(urlparse(url).query)
        rank, world_size = (
            int(query[name][0]) if name in query else None for name in ("rank", "world_size")
        )
        ours = answer(InitArguments(rank=rank, world_size=world_size))
        if ours is None:
            # As in a plain script: its rank 0 hosts the store.
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
            yield from native(url, *args, **kwargs)
        else:
            yield ours

    _rendezvous_handlers["env"] = handler


_native_env_rendezvous = _rendezvous_handlers["env"]


def forget_names() -> None:
    """Forget what torch has worked out for groups that are no more: it kept their names.

    A DTensor's operation is planned once for a mesh, and meshes of equal shape count as equal: the
    plan holds the first one, and with it the names of groups that a later one does not have.
    Compiled graphs hold names as constants.
    """
    torch_sharded.forget_results()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    broken = lacking(c10d, ["init_process_group"], "c10d")
    broken += lacking(dist, ["init_process_group"], "torch.distributed")
    broken += [] if "env" in _rendezvous_handlers else ["the rendezvous of env:// is gone"]
    return [f"torch {torch.__version__}: {what}" for what in broken]
