"""Make the ranks hold the same model before it is spread, and the same buffers while it trains.

FSDP shards what each rank holds and asks nobody: with different initial weights the model would
be mixed from the ranks' parts, without an error. DDP broadcasts parameters. We do one thing for
every layout: compare the models' shapes, then give every rank what rank 0 holds.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.compat import torch_modules
from nbdist.errors import LayoutError

_SOURCE = 0  # the rank whose weights count


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
    digest = hashlib.blake2b(repr(table).encode(), digest_size=16).digest()
    halves = [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in (0, 8)]
    mine = torch.tensor(halves, dtype=torch.int64, device=device_type)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    if all(torch.equal(other, everyone[_SOURCE]) for other in everyone):
        return
    tables: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tables, table)
    rank = next(r for r, other in enumerate(tables) if other != tables[_SOURCE])
    raise LayoutError(
        f"Ranks {_SOURCE} and {rank} bring different models: "
        + _first_difference(tables[_SOURCE], tables[rank], rank),
        why="every rank holds a part of one and the same model",
        do="build the model on every rank from the same code and sizes",
    )


def _first_difference(here: list[tuple[str, str]], there: list[tuple[str, str]], rank: int) -> str:
    for (name, mine), (other_name, theirs) in zip(here, there, strict=False):
        if name != other_name:
            return f"{name} stands where rank {rank} has {other_name}."
        if mine != theirs:
            return f"{name} is {mine} on rank {_SOURCE} and {theirs} on rank {rank}."
    # Two rows are what was asked for.
    return f"{len(here) - 2} parameters and buffers here, {len(there) - 2} on rank {rank}."


@torch.no_grad()
def broadcast(model: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers, in place; not what is on meta."""
    everything = [*model.parameters(), *model.buffers()]
    tensors = [t.detach() for t in everything if t.numel() and not t.is_meta]
    if tensors:
        torch_modules.broadcast_coalesced(tensors, _SOURCE)


class BufferSync:
    """After each training forward, gives every rank rank 0's persistent buffers.

    So that running statistics are one thing: `DistributedDataParallel` broadcasts them before each
    forward, in evaluation too. After the forward leaves the same numbers on rank 0, equal ones on
    the others, and no collective in evaluation, which a rank may then do alone. Buffers that are
    not saved with the model (masks, tables) are constants and stay at home.

    With groups, where a forward is a part of a step, `sync` is called at the end of it instead, and
    the first rank of each group gives.
    """

    def __init__(self, model: nn.Module, groups: Sequence[dist.ProcessGroup] | None = None) -> None:
        self._groups = groups
        self._places = [(module, name) for _, module, name in _saved_buffers(model)]
        if self._places and groups is None:
            model.register_forward_hook(self._after_forward)

    @property
    def count(self) -> int:
        """How many buffers are kept alike."""
        return len(self._places)

    def _after_forward(self, module: nn.Module, _args: object, _output: object) -> None:
        if module.training and torch.is_grad_enabled():
            self.sync()

    def sync(self) -> None:
        """Give every rank the first one's buffers. Collective."""
        if not self._places:
            return
        # `.data` has a version counter of its own: backward does not use the running
        # statistics, and must not refuse because they have changed.
        buffers = [_as_float32(getattr(owner, name).data) for owner, name in self._places]
        for group in [None] if self._groups is None else self._groups:
            torch_modules.broadcast_coalesced(buffers, _SOURCE, group)


def buffers_alike(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that `BufferSync` keeps alike, by qualified name."""
    for name, module, own_name in _saved_buffers(model):
        yield name, getattr(module, own_name)


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (qualified name, module, its own name) of each buffer that is saved and not empty."""
    saved = model.state_dict().keys()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            qualified = f"{prefix}.{name}" if prefix else name
            if buffer.numel() and qualified in saved:
                yield qualified, module, name


def _as_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as float32 where it can be: only bits are sent.

    A broadcast carries one dtype; batch norm's integer counters would need a second one a step,
    which costs as much as the first (some 180 us of processor time on gloo).
    """
    if tensor.dtype is torch.float32 or tensor.element_size() % 4 or not tensor.is_contiguous():
        return tensor
    return tensor.view(-1).view(torch.float32)
