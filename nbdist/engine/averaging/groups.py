"""Groups of near ranks, inside which averages are cheap: those of one host, or neighbours.

A group is found by its name, not held: after a fault, on a new rank and with another
number of ranks the same name finds the group, or all ranks make it. Main thread, all
ranks.
"""

import socket

import torch.distributed as dist

from nbdist.engine.compat.groups import torch_groups
from nbdist.shared.errors import LayoutError

Parts = list[tuple[int, ...]]


def parts_of(hosts: list[str], size: int | None) -> Parts:
    """Return the groups of ranks.

    Args:
        hosts: The host of each rank.
        size: Neighbours in a group; None: the ranks of each host.

    Raises:
        LayoutError: That makes one group, or groups of different sizes.
    """
    n = len(hosts)
    if size is not None:
        if size < 1 or n % size or size == n:
            fits = [d for d in range(1, n) if n % d == 0]
            raise LayoutError(
                f"group_size={size} does not divide {n} ranks into several equal groups.",
                do=f"use one of {', '.join(map(str, fits))}" if fits else "use more ranks",
            )
        return [tuple(range(first, first + size)) for first in range(0, n, size)]
    parts = [tuple(r for r in range(n) if hosts[r] == host) for host in dict.fromkeys(hosts)]
    if len(parts) == 1:
        raise LayoutError(
            f"All {n} ranks are on one host, {hosts[0]}: there is nothing between hosts.",
            do="say how many ranks make a group: group_size=2; or leave `between` out",
        )
    if len({len(part) for part in parts}) > 1:
        sizes = ", ".join(f"{hosts[part[0]]}: {len(part)}" for part in parts)
        raise LayoutError(
            f"Hosts have different numbers of ranks ({sizes}).",
            why="a mean of means is the mean over all only where groups are equally large",
            do="start as many ranks on each, or use group_size",
        )
    return parts


def inside(size: int | None) -> dist.ProcessGroup:
    """Return this rank's group; make the groups of all ranks if there are none yet.

    Raises:
        LayoutError: The ranks cannot be grouped so.
    """
    name = "hosts" if size is None else f"{size} ranks"
    title = f"averaging inside {name}"
    for live in torch_groups.live_groups():
        if live.group.group_desc == title:
            return live.group
    hosts = [""] * dist.get_world_size()
    if size is None:
        dist.all_gather_object(hosts, socket.gethostname())
    mine = None
    for part in parts_of(hosts, size):
        made = dist.new_group(list(part), group_desc=title)
        if dist.get_rank() in part:
            mine = made
    assert isinstance(mine, dist.ProcessGroup)
    return mine
