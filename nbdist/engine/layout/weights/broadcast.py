"""Make the ranks hold the same model before it is spread.

FSDP shards each rank's weights without a check: with different initial weights the model would
be mixed from the ranks' parts, without an error. DDP broadcasts parameters. We do one thing for
every layout: compare the models' shapes, then give every rank what rank 0 holds.
"""

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.compat import torch_modules, torch_quantized
from nbdist.shared.errors import LayoutError

_SOURCE = 0  # the rank whose weights count

Table = list[tuple[str, str]]  # what to compare, and how it is on this rank


def check_same_model(model: nn.Module, asked: dict[str, str], device_type: str) -> None:
    """Raise on every rank when the ranks bring different models or ask for different layouts.

    Without this, the first collective with other sizes kills the process inside gloo. Costs one
    all_gather of 16 bytes a rank; the tables themselves travel only when they differ.

    Raises:
        LayoutError: With the first thing that differs and the ranks concerned.
    """
    table = list(asked.items())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        grad = " trained" if tensor.requires_grad else ""
        table.append((name, f"{tuple(tensor.shape)} {tensor.dtype}{grad}"))
    found = first_difference(table, device_type)
    if found is None:
        return
    rank, here, there = found
    raise LayoutError(
        f"Ranks {_SOURCE} and {rank} have different models: {_name_row(here, there, rank)}",
        why="every rank holds a part of one and the same model",
        do="build the model on every rank from the same code and sizes",
    )


def first_difference(table: Table, device_type: str) -> tuple[int, Table, Table] | None:
    """Return the first rank with another table than rank 0, that one's and its own; else None.

    Collective, also where nothing has been agreed: 16 bytes a rank, of one size on all of them.
    """
    digest = hashlib.blake2b(repr(table).encode(), digest_size=16).digest()
    halves = [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in (0, 8)]
    mine = torch.tensor(halves, dtype=torch.int64, device=device_type)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    if all(torch.equal(other, everyone[_SOURCE]) for other in everyone):
        return None
    tables: list[Table] = [table] * dist.get_world_size()
    dist.all_gather_object(tables, table)
    rank = next(r for r, other in enumerate(tables) if other != tables[_SOURCE])
    return rank, tables[_SOURCE], tables[rank]


def _name_row(here: Table, there: Table, rank: int) -> str:
    for (name, mine), (other_name, theirs) in zip(here, there, strict=False):
        if name != other_name:
            return f"Rank {rank} has {other_name} in the place of {name}."
        if mine != theirs:
            return f"{name} is {mine} on rank {_SOURCE} and {theirs} on rank {rank}."
    # Two rows are what was asked for.
    return f"{len(here) - 2} parameters and buffers here, {len(there) - 2} on rank {rank}."


@torch.no_grad()
def broadcast(model: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers, in place; not what is on meta."""
    everything = [*model.parameters(), *model.buffers()]
    held = [t.detach() for t in everything if t.numel() and not t.is_meta]
    tensors = [part for tensor in held for part in torch_quantized.plain(tensor)]
    if tensors:
        torch_modules.broadcast_coalesced(tensors, _SOURCE)
