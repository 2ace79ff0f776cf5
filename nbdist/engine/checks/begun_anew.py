"""Say that a loop over torch's own DataLoader begins anew, where what it trains goes on.

A cell that is run again keeps its model; nbdist's loaders go on with it, and torch's do not.
Main thread, in the hook on optimizers.
"""

import weakref
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nbdist.engine.compat import torch_hooks, torch_loaders
from nbdist.engine.steps import keep, step_state
from nbdist.engine.training import training


class BegunAnew:
    """Of which loop it was said last."""

    def __init__(self) -> None:
        self._told: weakref.ref[Any] | None = None

    def tell(self, optimizer: Optimizer) -> None:
        """Say it once, before an optimizer's first step in a cell that goes on."""
        iterator, steps = training.here.begun_pass(), step_state.here().steps.get(optimizer)
        if iterator is None or torch_loaders.loader_of(iterator) >= 0:
            return
        if self._told is not None and self._told() is iterator:
            return
        if steps is not None and steps.whole and dist.get_rank() == 0:
            self._told = weakref.ref(iterator)
            print(
                f"The loop over {_name_of(iterator)} begins at its first batch again, with the "
                f"model of step {steps.whole}: nbdist.loader goes on where it stopped, and others "
                "do not."
            )


def _name_of(iterator: Any) -> str:
    sampler = torch_hooks.sampler_of(iterator)
    for name, value in keep.here.named().items():
        if isinstance(value, DataLoader) and sampler in (value.sampler, value.batch_sampler):
            return f"{name} (a DataLoader)"
    return "a DataLoader"
