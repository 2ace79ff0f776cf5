"""Prepare a process before it joins: its environment, devices, answers to scripts."""

import os
from typing import Any

import psutil
import torch
import torch.distributed as dist

from nbdist.engine.compat import torch_init
from nbdist.engine.compat.groups.torch_groups import PrefixStore, Store
from nbdist.engine.compat.torch_init import InitArguments
from nbdist.engine.group import meeting, sockets
from nbdist.engine.group.state import GroupState
from nbdist.shared.errors import ClusterError
from nbdist.shared.options import ClusterOptions
from nbdist.shared.placement import RankPlacement, gpu_of


def environment(store_host: str, store_port: int, interface: str, *, recovers: bool = True) -> None:
    """Set the environment of torch, gloo and NCCL for this store and interface address.

    Without `recovers`, as in a script, NCCL's watchdog ends the process at a fault, and networks
    that are chosen already stay.
    """
    # MASTER_* and the agent's store: a program's own `init_process_group("env://")` comes to our
    # store as a client, and no rank ever hosts one. The rest keeps NCCL's watchdog from ending
    # the process over a communicator that we abort ourselves, and on the chosen interface.
    os.environ.update(
        MASTER_ADDR=store_host,
        MASTER_PORT=str(store_port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        # From torch 2.15 "nccl" is another class, whose abort has not been tried here.
        TORCH_DIST_USE_NCCL2="0",
    )
    if recovers:
        os.environ.update(
            TORCHELASTIC_RESTART_COUNT="0",
            TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
            TORCH_NCCL_ENABLE_MONITORING="0",
            TORCH_NCCL_DUMP_ON_TIMEOUT="0",
        )
    name = _interface_name(interface)
    if name is not None:
        # Also for a backend that a program makes by hand, without our device. NCCL takes a name
        # without "=" for how names begin: eth1 would be eth10, too.
        for variable, value in {
            "GLOO_SOCKET_IFNAME": name,
            "NCCL_SOCKET_IFNAME": f"={name}",
        }.items():
            if recovers or variable not in os.environ:
                os.environ[variable] = value


def _interface_name(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return None


def take_device(options: ClusterOptions, place: RankPlacement) -> torch.device:
    """Return the rank's device; a GPU becomes the current one of the process.

    Raises:
        StartError: The host has too few GPUs.
    """
    if options.device != "cuda":
        return torch.device(options.device)
    number = gpu_of(place.local_rank, torch.cuda.device_count(), options.backend, os.environ)
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


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
            "gloo's listening socket could not be distinguished from others.",
            why=f"{len(new)} sockets began to listen while gloo opened its own on {interface}.",
            do="%dist restart",
        )
    return device, new.pop()


def agree(here: GroupState, asked: InitArguments) -> None:
    """Accept a program's `init_process_group`, and say so: this rank is in its group.

    It returns when the ranks of the cell have called it, as torch's does.

    Raises:
        ClusterError: The program asks for another group than this one, or a rank did not come.
    """
    differing = _differing(here, asked)
    if differing:
        raise ClusterError(
            "init_process_group asks for another group than the one that these ranks have.",
            why="; ".join(differing),
            do="leave the line out, or call init_process_group() without these values.",
        )
    line = (
        f"init_process_group: the ranks' own group is used ({here.backend}, {here.world_size} ranks"
    )
    if asked.timeout is not None and asked.timeout.total_seconds() != here.timeout_s:
        line += f", timeout {here.timeout_s:g} s as %dist start set it"
    if here.rank == 0:
        print(f"{line}).")
    meeting.meet(here, asked.timeout)


def _differing(here: GroupState, asked: InitArguments) -> list[str]:
    """Return the differences between a program's arguments and this rank's group. Pure."""
    had = torch_init.backends_in(here.backend)
    pairs = [
        ("backend", asked.backends, had, asked.backends is None or asked.backends <= had),
        ("rank", asked.rank, here.rank, asked.rank in (None, here.rank)),
        (
            "world_size",
            asked.world_size,
            here.world_size,
            asked.world_size in (None, here.world_size),
        ),
    ]
    return [
        f"it asks for {name} {_in_words(wanted)}, and the group has {_in_words(has)}"
        for name, wanted, has, fits in pairs
        if not fits
    ]


def _in_words(value: object) -> str:
    return " and ".join(sorted(value)) if isinstance(value, frozenset) else str(value)


def answer_env(here: GroupState, asked: InitArguments) -> tuple[Store, int, int] | None:
    """Return (store, rank, world size) for `env://`, or None: the program means another group.

    MASTER_ADDR and MASTER_PORT, which scripts set to any free port, are not asked: all ranks of
    this cluster meet in its own store.
    """
    environ = os.environ
    rank = int(environ.get("RANK", here.rank)) if asked.rank is None else asked.rank
    size = asked.world_size
    size = int(environ.get("WORLD_SIZE", here.world_size)) if size is None else size
    if (rank, size) != (here.rank, here.world_size):
        return None
    here.env_rendezvous += 1
    return PrefixStore(f"env/{here.env_rendezvous}", here.place()), rank, size
