"""DDP's reducer in a dry world, where torch's own, in C++, cannot run: its buckets and collectives.

From the second backward on it has the buckets that torch lays anew in the order in which gradients
were ready, of 1 MiB and then of 25 MiB each, and room for all of them beside the gradients.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from nbdist.engine.compat import torch_dry

FIRST_BYTES = 1 << 20
BYTES = 25 << 20


@dataclass
class DryBucket:
    """What a hook is given, as by torch's `GradBucket`: gradients that are sent at once."""

    _number: int
    _is_last: bool
    _parameters: list[Tensor]
    _room: Tensor
    missing: set[int] = field(default_factory=set)  # parameters without a gradient yet, by `id`

    def begin(self) -> None:
        """Wait for the next backward."""
        self.missing = set(map(id, self._parameters))

    def index(self) -> int:
        """Return its number."""
        return self._number

    def is_last(self) -> bool:
        """Return whether it is the one with the first parameters."""
        return self._is_last

    def parameters(self) -> list[Tensor]:
        """Return those whose gradients it has."""
        return self._parameters

    def buffer(self) -> Tensor:
        """Return the gradients, flat."""
        return self._room

    def gradients(self) -> list[Tensor]:
        """Return the gradients, each in its shape."""
        parts = self._room.split([p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]


class DryReducer:
    """Sends the gradients of one model, on the thread that runs backward.

    Attributes:
        group: With whom they are averaged.
        trained: Parameters whose gradients these are.
        expects: Whether gradients are sent: within `no_sync` they are not.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        *,
        one_bucket: bool = False,
        keeps_order: bool = False,
    ) -> None:
        """Begin with the next backward.

        Args:
            model: Its trained parameters are averaged.
            group: With whom.
            one_bucket: Put all of them into one.
            keeps_order: Buckets are never laid anew, as where some parameters may go unused.
        """
        self.group = group
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.expects = True
        self._limits = (1 << 62, 1 << 62) if one_bucket else (FIRST_BYTES, BYTES)
        self._keeps_order = keeps_order
        self._order: list[Tensor] = []  # in which gradients were ready
        self._buckets: list[DryBucket] = []
        self._sent = 0  # buckets, in this backward
        self._average: Callable[[DryBucket], Any] = self._sum
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self.ready)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return those whose gradients it averages."""
        return iter(self.trained)

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Have a hook average each bucket, as DDP's reducer does."""
        self._average = lambda bucket: hook(state, bucket)

    @property
    def is_unfinished(self) -> bool:
        """Whether some gradients have come, and others not."""
        missing = sum(len(bucket.missing) for bucket in self._buckets)
        come = len(self.trained) - missing if self._buckets else len(self._order)
        return 0 < come < len(self.trained)

    def ready(self, parameter: Tensor) -> None:
        """Take note of a gradient; buckets that are full are sent one after the other."""
        if not self.expects:
            return
        if not self._buckets:
            self._order.append(parameter)
            if len(self._order) < len(self.trained):
                return
            self._buckets = self._laid()
        for bucket in self._buckets:
            bucket.missing.discard(id(parameter))
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._send(self._buckets[self._sent])
            self._sent += 1
        if self._sent == len(self._buckets):
            self._sent = 0
            for bucket in self._buckets:
                bucket.begin()

    def _laid(self) -> list[DryBucket]:
        order: list[Tensor] = [*(self.trained[::-1] if self._keeps_order else self._order)]
        places = torch_dry.ddp_buckets(order, *self._limits)
        members = [[order[i] for i in bucket] for bucket in places]
        return [
            DryBucket(
                number,
                number == len(members) - 1,
                own,
                own[0].new_empty(sum(p.numel() for p in own)),
            )
            for number, own in enumerate(members)
        ]

    def _send(self, bucket: DryBucket) -> None:
        with torch_dry.answered_sums():
            self._average(bucket)

    def _sum(self, bucket: DryBucket) -> None:
        dist.all_reduce(bucket.buffer(), group=self.group)
