"""Send tokens to the ranks of their experts, and the results back, with autograd.

A pair is a token with one of its experts. Pairs travel as rows, in the order of their experts, with
their weights; what an expert makes of a row returns to the row's token. First ranks tell each other
how many rows come for which expert. Both ways are one collective, which backward makes the other
way around. Collective, all of it, on the thread that runs forward or backward: a rank whose experts
get no row takes part all the same.
"""

# T tokens of one rank, K experts a token, H width, E experts, N ranks of ep, R rows that come here

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from nbdist.engine.layout.plan import numbers
from nbdist.shared.errors import LayoutError

# Makes, of hidden states (R, H), experts of this rank (R, 1) and weights (R, 1), results (R, H).
Compute = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Routes:
    """Where rows go, and where those come from that come here.

    Attributes:
        order: The pairs (T * K), numbered by token, in the order of their experts.
        sends: Rows for each rank.
        receives: Rows from each rank.
        expert: Of each row that comes (R, 1), counted from this rank's first.
        load: How much that is for this rank's experts.
    """

    order: Tensor
    sends: list[int]
    receives: list[int]
    expert: Tensor
    load: "Load"


@dataclass(frozen=True, slots=True)
class Load:
    """What a rank's experts compute in one forward.

    Attributes:
        counts: Rows of each of them.
        even: Rows that this rank would have, had all ranks as many.
    """

    counts: list[int]
    even: float


def on_owners(
    compute: Compute, hidden: Tensor, index: Tensor, weight: Tensor, experts: int, mesh: DeviceMesh
) -> tuple[Tensor, Load]:
    """Return the sum of what its experts make of each token, and the load of this rank's experts.

    Args:
        compute: Runs this rank's experts; gets at least one row.
        hidden: (T, H).
        index: (T, K), which experts.
        weight: (T, K), how much each counts.
        experts: E, of which each rank of the mesh has as many.
        mesh: The axis `ep`.

    Raises:
        LayoutError: An index is no expert's.
    """
    tokens, each = index.shape
    routes = _routes(index.flatten(), experts, mesh)
    group, sends, receives = mesh.get_group(), routes.sends, routes.receives
    rows = sent(hidden[routes.order // each], sends, receives, group)
    weights = sent(weight.flatten()[routes.order].unsqueeze(1), sends, receives, group)
    arrived, expert = len(rows), routes.expert
    if not arrived:
        # A row that counts nothing: gradients pass through the experts all the same, as zeros, and
        # through both exchanges, for which others wait.
        ramp = torch.linspace(0.1, 1, hidden.shape[1], dtype=rows.dtype, device=rows.device)
        rows, weights = (
            torch.cat([rows, ramp.unsqueeze(0)]),
            torch.cat([weights, weight.new_ones(1, 1)]),
        )
        expert = expert.new_zeros(1, 1)
    made = sent(compute(rows, expert, weights)[:arrived], receives, sends, group)
    places = torch.empty_like(routes.order)
    places[routes.order] = torch.arange(len(places), device=places.device)
    return made[places].view(tokens, each, made.shape[1]).sum(1), routes.load


def _routes(expert: Tensor, experts: int, mesh: DeviceMesh) -> _Routes:
    """Return the routes of pairs (T * K) with these experts. Collective; the host waits once.

    Where tensors have no numbers, experts get an even share.
    """
    ranks, own = mesh.size(), experts // mesh.size()
    is_known = numbers.are_here()
    counts = torch.bincount(expert, minlength=experts) if is_known else expert.new_empty(experts)
    if len(counts) > experts:
        raise LayoutError(
            f"A token is for expert {len(counts) - 1}, and there are {experts}, from 0 on.",
            why="its rank is not known under ep",
        )
    # Behind a rank's counts stands all that it sends, so that each knows how much there is.
    told = F.pad(counts.view(ranks, own), (0, 1), value=len(expert))
    come = torch.empty_like(told)
    dist.all_to_all_single(come, told, group=mesh.get_group())
    if is_known:
        sent, came = torch.stack([told, come]).tolist()
    else:
        sent = even_shares(len(expert), ranks, own)
        came = [sent[mesh.get_local_rank()]] * ranks
    come = come[:, :own].flatten()
    sends, receives = ([sum(of_rank[:own]) for of_rank in side] for side in (sent, came))
    places = torch.arange(own, device=expert.device).repeat(ranks)
    *of_experts, everything = (sum(of_expert) for of_expert in zip(*came, strict=True))
    return _Routes(
        expert.argsort(stable=True),
        sends,
        receives,
        places.repeat_interleave(come, output_size=sum(receives)).unsqueeze(1),
        Load(of_experts, everything / ranks),
    )


def even_shares(pairs: int, ranks: int, own: int) -> list[list[int]]:
    """Return, for each rank, pairs for each of its experts and all pairs, were experts alike."""
    ends = [pairs * n // (ranks * own) for n in range(ranks * own + 1)]
    each = [after - before for before, after in pairwise(ends)]
    return [[*each[i:][:own], pairs] for i in range(0, len(each), own)]


def sent(rows: Tensor, sends: list[int], receives: list[int], group: Any) -> Tensor:
    """Return what comes where each rank gets its number of rows. Collective, also its backward."""
    arrived: Tensor = _Exchange.apply(rows, sends, receives, group)  # type: ignore[no-untyped-call]
    return arrived


class _Exchange(torch.autograd.Function):
    """Rows for each rank become those from each rank."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sends: list[int], receives: list[int], group: Any
    ) -> Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return _exchanged(rows, sends, receives, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradient, ctx.receives, ctx.sends, ctx.group), None, None, None


def _exchanged(rows: Tensor, sends: list[int], receives: list[int], group: Any) -> Tensor:
    arrived = rows.new_empty((sum(receives), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), receives, sends, group=group)
    return arrived


def exchanged_evenly(flat: Tensor, ranks: int, group: Any) -> Tensor:
    """Return what comes where ranks send each other equal parts of a vector. Collective."""
    each = [len(flat) // ranks] * ranks
    return _exchanged(flat, each, each, group)


def after(earlier: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors whose backward comes before that of `earlier`, which have one in any case."""
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in earlier)):
        return tensors
    later: tuple[Tensor, ...] = _After.apply(len(earlier), *earlier, *tensors)  # type: ignore[no-untyped-call]
    return later


class _After(torch.autograd.Function):
    """Copies of tensors; has their backward come first."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.count = count
        # A block that runs again in backward does so until its last saved tensor: here all ranks
        # save one after the exchange, also those that got nothing by it.
        ctx.save_for_backward(tensors[0].new_empty(0))
        return tuple(tensor.clone() for tensor in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *[None] * ctx.count, *gradients


def row_bytes(hidden: Tensor, weight: Tensor, made: Tensor) -> int:
    """Return the bytes of a pair that travels, forward and backward: twice there, twice back."""
    there = hidden.shape[1] * hidden.element_size() + weight.element_size()
    return 2 * (there + made.shape[1] * made.element_size())


def count_bytes(experts: int, ranks: int) -> int:
    """Return the bytes of counts in one forward."""
    return (experts + ranks) * torch.int64.itemsize
