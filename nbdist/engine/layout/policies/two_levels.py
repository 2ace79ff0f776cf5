"""Average in two levels: inside a group of near ranks as it is, between the groups made smaller.

    reduce-scatter inside     each rank has the group's sum of its own slice
    all-reduce between        ranks with the same slice, one of each group
    all-gather inside         every rank has the whole again

So each rank sends 1/N of the bytes between groups of N: all their links carry a part.

Threads: called by DDP's reducer inside of backward. Every step waits for the one before, on the
thread that asks: collectives that gloo's threads start would meet others' in another order.

Source: Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 4.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from nbdist.engine.compat.groups import torch_groups
from nbdist.engine.layout.policies.efficiency import Compress
from nbdist.engine.layout.policies.policies import Policies
from nbdist.shared.errors import LayoutError


def group_size(policy: Compress, world_size: int, ranks_on_host: int) -> int:
    """Return the number of ranks in a group.

    Raises:
        LayoutError: That makes no two equal groups, or groups of one rank.
    """
    size = ranks_on_host if policy.between == "hosts" else policy.between
    assert size is not None, "asked where there are groups"
    if policy.between == "hosts" and size == world_size:
        raise LayoutError(
            f"All {world_size} ranks are on one host: there is nothing between hosts.",
            do="say how many ranks make a group: between=2; or leave `between` out",
        )
    if world_size % size or not 1 < size < world_size:
        what = f"{size} ranks a host" if policy.between == "hosts" else f"between={size}"
        fits = [n for n in range(2, world_size) if world_size % n == 0]
        raise LayoutError(
            f"{what} does not cut {world_size} ranks into several equal groups of several.",
            do=f"use one of {', '.join(map(str, fits))}" if fits else "leave `between` out",
        )
    return size


def with_groups(asked: Policies, world_size: int, ranks_on_host: int) -> Policies:
    """Return the policies with a number where "hosts" was said."""
    compress = asked.compress
    if compress is None or compress.between is None:
        return asked
    size = group_size(compress, world_size, ranks_on_host)
    return replace(asked, compress=replace(compress, between=size))


class TwoLevels:
    """The groups of this rank: the one it is inside of, and those that have its slice elsewhere."""

    def __init__(self, mesh: DeviceMesh) -> None:
        # The mesh and not its groups: a new rank gets the mesh with its own groups.
        self._mesh = mesh

    def reduce(self, whole: Tensor) -> Tensor:
        """Return this rank's slice of the sum inside, of a flat tensor; filled up with zeros."""
        padded = self._padded(whole)
        part = padded.new_empty(padded.numel() // self._size)
        torch_groups.reduce_scatter_single(part, padded, group=self._mesh.get_group("inside"))
        return part

    def exchange(self, part: Tensor) -> None:
        """Make a slice the sum of all groups' slices, in place."""
        dist.all_reduce(part, group=self._mesh.get_group("between"))

    def gather(self, part: Tensor, count: int) -> Tensor:
        """Return the first `count` elements of all slices inside, in one."""
        whole = part.new_empty(part.numel() * self._size)
        torch_groups.all_gather_single(whole, part, group=self._mesh.get_group("inside"))
        return whole[:count]

    def own_part(self, whole: Tensor) -> Tensor:
        """Return this rank's slice of a tensor equal inside the group, as `reduce` cuts it."""
        padded = self._padded(whole)
        return padded.chunk(self._size)[self._mesh.get_local_rank("inside")].clone()

    @property
    def _size(self) -> int:
        return self._mesh.size(1)

    def _padded(self, whole: Tensor) -> Tensor:
        missing = -whole.numel() % self._size
        return F.pad(whole, (0, missing)) if missing else whole


def done(value: Tensor) -> torch.futures.Future[Any]:
    """Return a future that holds a value already, which is what a reducer asks of a hook."""
    devices: list[int | str | torch.device] | None = [value.device] if value.is_cuda else None
    future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
    future.set_result(value)
    return future
