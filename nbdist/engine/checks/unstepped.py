"""Notice a cell that computes gradients for an optimizer, and never lets it step.

Gradients may be all that a cell is for. So the optimizer is one that has never stepped, that the
cell has made or names, whose weights have got gradients, and whose weights are as they were: a loop
that changes them by hand needs no step. Main thread.
"""

import logging
import re
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nbdist.engine.compat import torch_hooks, torch_live
from nbdist.engine.steps import keep, step_state
from nbdist.engine.training import training

_log = logging.getLogger("nbdist.checks")

_SAMPLE = 16  # numbers of one weight that are compared


@dataclass(slots=True)
class _Idle:
    """An optimizer that had not stepped by the cell's first backward, and a sample of a weight."""

    optimizer: weakref.ref[Optimizer]
    weight: weakref.ref[Tensor]
    version: int
    numbers: Tensor
    has_gradients: bool = False

    def is_unchanged(self) -> bool:
        weight = self.weight()
        if weight is None or weight._version != self.version:
            return False
        return torch.equal(_numbers(weight), self.numbers)


class Unstepped:
    """The optimizers that a cell may have forgotten."""

    def __init__(self) -> None:
        self._made_before = 0  # the number of the newest optimizer when the cell began
        self._scaled_before = 0
        self._idle: list[_Idle] = []

    def cell_began(self) -> None:
        """Look at the first backward of the cell."""
        self._made_before = torch_live.here.newest_number()
        self._scaled_before = torch_hooks.count_of_scaled()
        self._idle = []
        training.here.at_backward(self._first_begins, self._first_ends)

    def _first_begins(self, *_: Any) -> None:
        known = step_state.here().steps
        for optimizer in torch_live.here.live(Optimizer):
            steps = known.get(optimizer)
            weights = [p for group in optimizer.param_groups for p in group["params"]]
            weight = next(
                (p for p in weights if p.requires_grad and p.numel() and not p.is_meta), None
            )
            if weight is not None and (steps is None or not steps.whole):
                held = weakref.ref(optimizer), weakref.ref(weight), weight._version
                self._idle.append(_Idle(*held, _numbers(weight).clone()))

    def _first_ends(self) -> None:
        training.here.at_backward(None)
        for idle in self._idle:
            optimizer = idle.optimizer()
            if optimizer is not None:
                groups = optimizer.param_groups
                idle.has_gradients = any(p.grad is not None for g in groups for p in g["params"])

    def in_cell(self, source: str) -> int:
        """Return how many optimizers a cell of this source should have let step."""
        training.here.at_backward(None)
        # A scaler leaves steps out, of a cell that asks for them.
        if training.here.current_step() or torch_hooks.count_of_scaled() != self._scaled_before:
            return 0
        try:
            return sum(self._is_meant(i, source) and i.is_unchanged() for i in self._idle)
        except Exception:
            _log.exception("An optimizer that has not stepped could not be read")
            return 0

    def _is_meant(self, idle: _Idle, source: str) -> bool:
        optimizer = idle.optimizer()
        if optimizer is None or not idle.has_gradients:
            return False
        if torch_live.here.number_of(Optimizer, optimizer) > self._made_before:
            return True
        names = [name for name, value in keep.here.named().items() if value is optimizer]
        return any(re.search(rf"\b{re.escape(name)}\b", source) for name in names)


def _numbers(weight: Tensor) -> Tensor:
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return local.detach().reshape(-1)[:_SAMPLE]
