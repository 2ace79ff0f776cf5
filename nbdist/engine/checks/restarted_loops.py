"""Report a loop without nbdist.loader that starts over, although its model is kept.

A cell that is run again keeps its model; nbdist's loaders continue with it, and no others do.
Main thread, in the hook on optimizers.
"""

from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nbdist.engine.compat import torch_hooks, torch_loaders
from nbdist.engine.data.position import resume
from nbdist.engine.steps import keep, step_state
from nbdist.engine.training import training


class RestartedLoops:
    """Reports each such loop of a cell once."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def report(self, optimizer: Optimizer, *, is_restored: bool) -> None:
        """Report a loop, before an optimizer's first step in a cell that continues.

        Args:
            optimizer: The one that steps.
            is_restored: The cell continues from a checkpoint, and may count its steps from there.
        """
        steps, begins = step_state.here().steps.get(optimizer), _begins(is_restored=is_restored)
        if not begins or begins in self._reported:
            return
        if steps is not None and steps.whole and dist.get_rank() == 0:
            self._reported.add(begins)
            print(
                f"{begins} again, with the model of step {steps.whole:,}: only a loop over "
                "nbdist.loader is continued where it stopped."
            )


def _begins(*, is_restored: bool) -> str:
    """Say where the loop that trains begins; "" if it continues."""
    iterator = training.here.begun_pass()
    if iterator is None:
        continues = is_restored or resume.here.has_loops_to_continue()
        return "" if continues else f"{resume.title()} runs from its first line"
    if torch_loaders.loader_of(iterator) >= 0:
        return ""
    return f"The loop over {_name_of(iterator)} begins at its first batch"


def _name_of(iterator: Any) -> str:
    sampler = torch_hooks.sampler_of(iterator)
    for name, value in keep.here.named().items():
        if isinstance(value, DataLoader) and sampler in (value.sampler, value.batch_sampler):
            return f"{name} (a DataLoader)"
    return "a DataLoader"
