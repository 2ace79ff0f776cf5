"""What a process prepares before it joins: its environment, gloo's device, answers to `env://`."""

import os
from typing import Any

import psutil
import torch.distributed as dist

from nbdist.engine import sockets
from nbdist.engine.compat.torch_compat import PrefixStore, Store
from nbdist.engine.membership import Membership
from nbdist.errors import ClusterError


def environment(store_host: str, store_port: int, interface: str) -> None:
    """Set what torch, gloo and NCCL read, for a store there and an interface with this address."""
    # MASTER_* and the agent's store: a program's own `init_process_group("env://")` comes to our
    # store as a client, and no rank ever hosts one. The rest keeps NCCL's watchdog from ending
    # the process over a communicator that we abort ourselves, and on the chosen interface.
    os.environ.update(
        MASTER_ADDR=store_host,
        MASTER_PORT=str(store_port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
        TORCH_NCCL_ENABLE_MONITORING="0",
        TORCH_NCCL_DUMP_ON_TIMEOUT="0",
    )
    name = _interface_name(interface)
    if name is not None:
        # Also for a backend that someone makes by hand, past our device.
        os.environ.update(GLOO_SOCKET_IFNAME=name, NCCL_SOCKET_IFNAME=name)


def _interface_name(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return None


def gloo_device(interface: str) -> tuple[Any, sockets.Address]:
    """Return a new gloo device on an interface, and the address that it listens on.

    Raises:
        ClusterError: Other sockets began to listen at the same time.
    """
    before = sockets.listeners()
    device = dist.ProcessGroupGloo.create_device(hostname=interface, lazy_init=False)
    new = sockets.listeners() - before
    if len(new) != 1:
        raise ClusterError(
            "gloo's listening socket could not be told from others.",
            why=f"{len(new)} sockets began to listen while gloo opened its own on {interface}.",
            do="%dist restart",
        )
    return device, new.pop()


def answer_env(here: Membership, store_host: str, store_port: int) -> tuple[Store, int, int] | None:
    """Return (store, rank, world size) for `env://`, or None: the program means another store."""
    environ = os.environ
    if (environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")) != (store_host, str(store_port)):
        return None
    here.env_rendezvous += 1
    store = PrefixStore(f"env/{here.env_rendezvous}", here.place())
    rank = int(environ.get("RANK", here.rank))
    return store, rank, int(environ.get("WORLD_SIZE", here.world_size))
