"""Read the loss of a step without making the main thread wait for a GPU.

A loss is copied when backward begins: on the CPU it is read at once; on CUDA it is copied to
pinned memory behind the work that is queued, and read when the copy has come, a step or more
later.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from nbdist.engine.compat.torch_hooks import local_scalar, unscaled


@dataclass(slots=True)
class PendingLoss:
    """The losses of one step's backwards, some of them perhaps still on their way."""

    values: list[float] = field(default_factory=list)
    copies: list[tuple[torch.Tensor, Any]] = field(default_factory=list)  # (pinned, event)

    def add(self, root: object) -> bool:
        """Take a backward's root in; False if it is no loss: not a real scalar tensor."""
        if not isinstance(root, torch.Tensor) or root.numel() != 1 or not root.is_floating_point():
            return False
        loss = local_scalar(unscaled(root))
        if loss is None:
            return False
        if loss.is_cuda:
            copy = torch.empty(1, dtype=loss.dtype, pin_memory=True)
            copy.copy_(loss.detach().reshape(1), non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(loss.device))
            self.copies.append((copy, event))
        else:
            self.values.append(float(loss.detach()))
        return True

    @property
    def is_ready(self) -> bool:
        """Whether `mean` would return without waiting."""
        return all(event.query() for _, event in self.copies)

    def mean(self) -> float | None:
        """Return the mean over the step's backwards; None without one. Waits for copies."""
        for copy, event in self.copies:
            event.synchronize()
            self.values.append(float(copy))
        self.copies.clear()
        return sum(self.values) / len(self.values) if self.values else None
