"""DDP's reducer in a dry world, where torch's own, in C++, cannot run: its buckets and collectives.

From the second backward on it has the buckets that torch lays anew in the order in which gradients
were ready, of 1 MiB and then of 25 MiB each, and room for all of them beside the gradients.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbdist.engine.compat import torch_dry

FIRST_BYTES = 1 << 20
BYTES = 25 << 20


class DryReducer:
    """Sends the gradients of one model, on the thread that runs backward."""

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, dtype: torch.dtype | None, one: bool
    ) -> None:
        """Begin with the next backward.

        Args:
            model: Its trained parameters are averaged.
            group: With whom.
            dtype: In which gradients are sent; None as they are.
            one: Put all of them into one bucket.
        """
        self._group, self._dtype = group, dtype
        self._limits = (1 << 62, 1 << 62) if one else (FIRST_BYTES, BYTES)
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._order: list[Tensor] = []  # in which gradients were ready
        self._buckets: list[tuple[set[int], Tensor]] = []
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter: Tensor) -> None:
        if self._buckets:
            for missing, room in self._buckets:
                if id(parameter) in missing:
                    missing.discard(id(parameter))
                    if not missing:
                        self._send(room)
            if not any(missing for missing, _ in self._buckets):
                self._lay()
            return
        self._order.append(parameter)
        if len(self._order) == len(self._trained):
            self._lay()
            for _, room in self._buckets:
                self._send(room)

    def _lay(self) -> None:
        places = torch_dry.ddp_buckets(self._order, *self._limits)
        members = [[self._order[i] for i in bucket] for bucket in places]
        rooms = [room for _, room in self._buckets] or [
            own[0].new_empty(sum(p.numel() for p in own)) for own in members
        ]
        self._buckets = [
            ({id(p) for p in own}, room) for own, room in zip(members, rooms, strict=True)
        ]

    def _send(self, room: Tensor) -> None:
        dist.all_reduce(room.to(self._dtype) if self._dtype else room, group=self._group)
