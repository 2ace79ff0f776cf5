"""Read scalar tensors, such as a loss, without making the main thread wait for a GPU.

On the CPU a number is read at once. On CUDA it is copied to pinned memory behind the work that is
queued, and read when the copy has arrived, a step or more later.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from nbdist.engine.compat.torch_hooks import local_scalar, unscaled


@dataclass(slots=True)
class Scalars:
    """Numbers of one step, some of them perhaps still being copied."""

    values: list[float] = field(default_factory=list)
    copies: list[tuple[torch.Tensor, Any]] = field(default_factory=list)  # (pinned, event)

    def add(self, scalar: torch.Tensor) -> None:
        """Add a real tensor of one element."""
        if scalar.is_cuda:
            copy = torch.empty(1, dtype=scalar.dtype, pin_memory=True)
            copy.copy_(scalar.detach().reshape(1), non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(scalar.device))
            self.copies.append((copy, event))
        else:
            self.values.append(scalar.item())

    def take(self, others: "Scalars") -> None:
        """Move the numbers of others here."""
        self.values += others.values
        self.copies += others.copies
        others.values, others.copies = [], []

    @property
    def is_ready(self) -> bool:
        """Whether `read` would return without waiting."""
        return not self.copies or all(event.query() for _, event in self.copies)

    def read(self) -> list[float]:
        """Return all numbers. Waits for copies."""
        for copy, event in self.copies:
            if not event.query():
                event.synchronize()
            self.values.append(float(copy))
        self.copies.clear()
        return self.values


def loss_of(tensors: object) -> torch.Tensor | None:
    """Return the loss that `backward` was called on, unscaled.

    None where it is not a loss: several roots, no real scalar, or a sharded one that needs a
    collective.
    """
    if type(tensors) is torch.Tensor:  # most are: neither sharded nor of a subclass
        is_loss = tensors.numel() == 1 and tensors.is_floating_point()
        return unscaled(tensors) if is_loss else None
    if not isinstance(tensors, torch.Tensor):
        if not isinstance(tensors, list | tuple) or len(tensors) != 1:
            return None
        tensors = tensors[0]
        if not isinstance(tensors, torch.Tensor):
            return None
    if tensors.numel() != 1 or not tensors.is_floating_point():
        return None
    return local_scalar(unscaled(tensors))
