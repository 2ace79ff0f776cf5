"""The live side of a proof: steps of the spread model, on this rank's part of the batch.

Main thread, all ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nbdist.engine.compat import torch_modules
from nbdist.engine.compat.torch_hooks import local_part
from nbdist.engine.layout.plan.random_numbers import seed_part
from nbdist.engine.layout.policies import compress
from nbdist.engine.layout.policies.precision import Scaler
from nbdist.engine.layout.verify.loss_sync import Midway, checked
from nbdist.engine.layout.verify.preconditions import Provable, Task, moved
from nbdist.engine.layout.weights import full_tensors


class ShardedRun:
    """The spread model while it is proven."""

    def __init__(self, layout: Provable, task: Task) -> None:
        self.model = layout.model
        self._layout = layout
        self._device = layout.mesh.device_type
        self._inputs = moved(task.inputs, self._device)
        self._run = task.live
        self._part, _ = layout.shape.data_part(dist.get_rank())
        # In a pipeline only the last stage has a loss, while others are in the middle of it.
        is_piped = layout.shape.pp > 1
        self._loss = checked(task.loss_fn) if is_piped else Midway(self.model, task.loss_fn)

    def step(self, step: int, scale: float) -> torch.Tensor | None:
        """Make gradients; returns the detached loss, None where this rank has none. Collective.

        Args:
            step: Which, from 1: it begins the stream of random numbers.
            scale: Of the loss, where the layout has a scaler. Gradients are without it afterwards.

        Raises:
            LayoutError: `loss_fn` makes no loss on some rank.
            UnlikeError: Ranks would make gradients of other parameters.
        """
        for parameter in self.model.parameters():
            parameter.grad = None
        seed_part(step, self._part)
        with self._scaled(scale):
            loss = self._run(self._inputs, self._loss)
        if scale != 1:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    local_part(parameter.grad).div_(scale)
        return loss

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return this rank's parts of the gradients by name, cut like parameters."""
        trained = ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
        return {name: _gradient(p) for name, p in trained}

    @torch.no_grad()
    def move(self, rate: float) -> None:
        """Make a step of plain SGD."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-rate)
        full_tensors.settle(self.model)

    def changed_by_compression(self, step: int, scale: float) -> float:
        """Make the last step again, compressed; return the relative change of all gradients."""
        exact = {name: gradient.clone() for name, gradient in self.gradients().items()}
        reducer = torch_modules.reducer_of(self.model)
        assert reducer is not None, "what compresses is a hook of one"
        with compress.switched(reducer, is_on=True):
            self.step(step, scale)
        found = self.gradients()
        change = sum(float((found[n] - g).double().norm()) ** 2 for n, g in exact.items())
        size = sum(float(g.double().norm()) ** 2 for g in exact.values())
        return float((change / size) ** 0.5) if size else 0.0

    @contextmanager
    def _scaled(self, scale: float) -> Iterator[None]:
        """Have the layout's scaler use this scale, and learn nothing."""
        kept = self._layout.scaler
        if kept.is_enabled():
            self._layout.scaler = Scaler(self._device, enabled=True, agrees=False, scale=scale)
        try:
            yield
        finally:
            self._layout.scaler = kept


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient, cut as the parameter is; zeros where it has none."""
    gradient: Any = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter.detach())
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        cut: torch.Tensor = gradient.redistribute(placements=parameter.placements)
        return cut
    whole_gradient: torch.Tensor = gradient
    return whole_gradient
