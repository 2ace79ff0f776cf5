"""Weights that pack several projections: each is cut, and stored as if there were but one.

    whole     q q q q | k k k k | v v v v
    rank 0    keeps    q q q q k k              computes with    q q | k k | v v
    rank 1    keeps    k k v v v v              computes with    q q | k k | v v

What a rank keeps is an ordinary shard of the plain order, so that all that saves, loads, averages
or steps weights knows no other kind. A forward exchanges the rows that another rank computes with,
and its backward their gradients: bytes of a part of the weight, whatever the batch.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Sections:
    """How a parameter is cut.

    Attributes:
        dim: Of the parameter.
        sizes: Of the sections along it, each of which is cut in as many parts.
    """

    dim: int
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The size of all, along the dim."""
        return sum(self.sizes)

    def rows(self, parts: int, part: int) -> list[range]:
        """Return the places along the dim of which a part consists, in their order."""
        starts = accumulate(self.sizes, initial=0)
        return [
            range(start + part * size // parts, start + (part + 1) * size // parts)
            for start, size in zip(starts, self.sizes, strict=False)
        ]

    def routes(self, parts: int, part: int) -> list[list[range]]:
        """Return for each part which of its rows a shard of the plain order holds, from 0."""
        length = self.size // parts
        first = part * length
        return [
            [
                range(max(rows.start - first, 0), min(rows.stop - first, length))
                for rows in self.rows(parts, other)
                if rows.start < first + length and rows.stop > first
            ]
            for other in range(parts)
        ]

    def leaving(self, parts: int, part: int) -> int:
        """Return how many rows a shard holds that other parts compute with."""
        routes = self.routes(parts, part)
        return sum(_count(rows) for other, rows in enumerate(routes) if other != part)

    def take(self, whole: torch.Tensor, parts: int, part: int) -> torch.Tensor:
        """Return a part of the whole parameter: a view where there is one section."""
        return _joined(whole, self.dim, self.rows(parts, part))


def _count(rows: list[range]) -> int:
    return sum(map(len, rows))


def _joined(tensor: torch.Tensor, dim: int, rows: list[range]) -> torch.Tensor:
    pieces = [tensor.narrow(dim, each.start, len(each)) for each in rows]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def one(dim: int, size: int) -> Sections:
    """Return the cut of a parameter that packs nothing."""
    return Sections(dim, (size,))


def equal(dim: int, size: int, count: int) -> Sections:
    """Return a cut into sections of one size; the last has what is left over."""
    each = size // count
    return Sections(dim, (*[each] * (count - 1), size - each * (count - 1)))


def computed(shard: torch.Tensor, cut: Sections, mesh: DeviceMesh) -> torch.Tensor:
    """Return what this rank computes with, of the shard that it keeps. Collective.

    Args:
        shard: This rank's of the plain order, along the dim of `cut`.
        cut: All its sections can be divided by the number of ranks.
        mesh: One-dimensional.
    """
    if len(cut.sizes) == 1:
        return shard
    taken: torch.Tensor = _Exchange.apply(shard, cut, mesh)  # type: ignore[no-untyped-call]
    return taken


class _Exchange(torch.autograd.Function):
    """Sends rows to the ranks that compute with them, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, cut: Sections, mesh: DeviceMesh) -> torch.Tensor:
        parts, here = mesh.size(), mesh.get_local_rank()
        routes = cut.routes(parts, here)
        ctx.gives = [_count(rows) for rows in routes]
        ctx.takes = [_count(cut.routes(parts, other)[here]) for other in range(parts)]
        ctx.order, ctx.dim, ctx.mesh = [rows for each in routes for rows in each], cut.dim, mesh
        # Ranks hold rows in the order in which a part has them: what comes in is in order.
        given = _joined(shard.movedim(cut.dim, 0), 0, ctx.order).contiguous()
        taken = _exchanged(given, ctx.takes, ctx.gives, mesh)
        return taken.movedim(0, cut.dim).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        given = gradient.movedim(ctx.dim, 0).contiguous()
        taken = _exchanged(given, ctx.gives, ctx.takes, ctx.mesh)
        pieces = zip(ctx.order, taken.split([len(rows) for rows in ctx.order]), strict=True)
        back = torch.cat([piece for _, piece in sorted(pieces, key=lambda each: each[0].start)])
        return back.movedim(0, ctx.dim).contiguous(), None, None


def _exchanged(
    given: torch.Tensor, takes: list[int], gives: list[int], mesh: DeviceMesh
) -> torch.Tensor:
    taken = given.new_empty((sum(takes), *given.shape[1:]))
    dist.all_to_all_single(taken, given, takes, gives, group=mesh.get_group())
    return taken
