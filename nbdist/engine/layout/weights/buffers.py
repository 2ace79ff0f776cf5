"""Keep running statistics one thing while a model trains: every rank gets rank 0's buffers.

What is saved with a model counts; buffers that are not (masks, tables) are constants and stay at
home. Small buffers are packed in one tensor of bytes, whatever their dtypes, so that a step
costs one broadcast and a few calls, and no Python for each of them.
"""

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbdist.engine.compat import torch_modules
from nbdist.engine.tap import purpose

_SMALL_BYTES = 1 << 20  # a larger buffer is sent in place: no copy is kept


class BufferSync:
    """After each training forward, gives every rank rank 0's persistent buffers.

    So that running statistics are one thing: `DistributedDataParallel` broadcasts them before each
    forward, in evaluation too. After the forward leaves the same numbers on rank 0, equal ones on
    the others, and no collective in evaluation, which a single rank may then do.

    With groups, where a forward is a part of a step, `sync` is called at the end of it instead, and
    the first rank of each group gives.
    """

    def __init__(self, model: nn.Module, groups: Sequence[dist.ProcessGroup] | None = None) -> None:
        self._groups: Sequence[dist.ProcessGroup | None] = [None] if groups is None else groups
        self._places = [(module, name) for _, module, name in _saved_buffers(model)]
        self._packed: _Packed | None = None
        if self._places and groups is None:
            model.register_forward_hook(self._after_forward)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the packed bytes, which a copy packs again from its own buffers."""
        return {**self.__dict__, "_packed": None}

    def _after_forward(self, module: nn.Module, _args: object, _output: object) -> None:
        if module.training and torch.is_grad_enabled():
            self.sync()

    def sync(self) -> None:
        """Give every rank the first one's buffers. Collective."""
        if not self._places or not self._groups:
            return
        buffers = [owner._buffers[name] for owner, name in self._places]
        if self._packed is None or not self._packed.is_of(buffers):
            self._packed = _Packed([buffer for buffer in buffers if buffer is not None])
        with purpose.sends(purpose.BUFFERS):
            self._packed.broadcast(self._groups)


class _Packed:
    """Buffers, and room for the small ones end to end."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._all = buffers
        # The widest first: so each begins where its dtype may.
        ordered = sorted(buffers, key=lambda b: (-b.element_size(), str(b.dtype)))
        small = [b for b in ordered if b.nbytes <= _SMALL_BYTES or not b.is_contiguous()]
        self._large = [b for b in ordered if b.nbytes > _SMALL_BYTES and b.is_contiguous()]
        device = buffers[0].device
        self._bytes = torch.empty(sum(b.nbytes for b in small), dtype=torch.uint8, device=device)
        parts = self._bytes.split([b.nbytes for b in small]) if small else ()
        pairs = [
            (b, part.view(b.dtype).view(b.shape)) for b, part in zip(small, parts, strict=True)
        ]
        # A list a dtype, which torch copies in one call.
        self._lists = [
            ([buffer for buffer, _ in pair], [room for _, room in pair])
            for _, group in itertools.groupby(pairs, lambda pair: pair[0].dtype)
            for pair in [list(group)]
        ]

    def is_of(self, buffers: Sequence[Tensor | None]) -> bool:
        """Return whether these are its buffers: `to` and assignments put others in their places."""
        return len(buffers) == len(self._all) and all(map(operator.is_, buffers, self._all))

    def broadcast(self, groups: Sequence[dist.ProcessGroup | None]) -> None:
        """Give the first rank's to all of each group, one group after the other. Collective."""
        places = [dist.get_rank(group) for group in groups]
        if 0 in places:
            for buffers, rooms in self._lists:
                torch._foreach_copy_(rooms, buffers)
        for group in groups:
            if self._lists:
                dist.broadcast(self._bytes, group=group, group_src=0)
            if self._large:
                torch_modules.broadcast_coalesced([b.data for b in self._large], 0, group)
        if any(places):
            for buffers, rooms in self._lists:
                # `.data` has its own version counter: backward does not use the running
                # statistics, and must not refuse because they have changed.
                torch._foreach_copy_([buffer.data for buffer in buffers], rooms)


def replicated_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that `BufferSync` keeps equal, by qualified name."""
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
