"""What is kept of steps that were not left out, beside their forwards: how weights came about.

Every few steps the weights and the optimizer's state are copied before the step: a *start*, from
which the steps behind it can be made again. Two are held, in turns, so that all steps since the
older one can be. Main thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbdist.engine.compat import torch_modules, torch_reducers
from nbdist.engine.steps.forwards import Clip
from nbdist.engine.steps.optimizer_options import Options
from nbdist.engine.steps.optimizer_states import States

Optimizer = torch.optim.Optimizer

# Steps from a start to the next: each number divides the one before, so that ranks whose inputs
# differ in size have starts in common.
LENGTHS: Final = (24, 12, 6, 3, 1)
MOST_SOUND: Final = 2 * LENGTHS[0]
START_BYTES: Final = 256 << 20  # of a start's weights and states, in the host's memory


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of this rank's gradients.

    Attributes:
        numbers: Of the parameters that have a gradient, among those of their optimizer.
        values: A norm for each; NaN or infinite where it may not be finite. On their device.
    """

    numbers: tuple[int, ...]
    values: torch.Tensor

    @classmethod
    def of(cls, parameters: Sequence[torch.Tensor], values: torch.Tensor | None) -> "Norms":
        """Return those of parameters that have a gradient now."""
        numbers = tuple(n for n, one in enumerate(parameters) if one.grad is not None)
        return cls(numbers, torch.empty(0) if values is None else values)

    def equal(self, others: "Norms") -> bool:
        """Return whether all are the same, bit for bit."""
        return self.numbers == others.numbers and torch.equal(
            self.values.cpu(), others.values.cpu()
        )


class Training:
    """What a cell trains, as far as its steps are kept.

    Attributes:
        optimizer: The first that has stepped in the cell; gives None where it is gone.
        model: What it trains; likewise.
        modules: Of the model.
        made: How many sound steps of it are kept so far.
        why_not: Why its steps cannot be made again; "" where nothing is known against it.
    """

    def __init__(
        self, optimizer: Optimizer | None, model: nn.Module | None, why_not: str = ""
    ) -> None:
        self.optimizer: Callable[[], Optimizer | None] = lambda: None
        self.model: Callable[[], nn.Module | None] = lambda: None
        if optimizer is not None:
            self.optimizer = ref(optimizer)
        if model is not None:
            self.model = ref(model)
        self.modules = [] if model is None else list(model.modules())
        self.made = 0
        self.why_not = why_not
        self._is_broken = True  # the step before cannot be made again
        reducer = None if model is None else _reducer_of(model)
        self._reducer: Callable[[], DistributedDataParallel | None] = lambda: None
        if reducer is not None:
            self._reducer = ref(reducer)
        self._had_rebuilt = reducer is None or torch_reducers.has_rebuilt_buckets(reducer)

    def sums_otherwise(self) -> bool:
        """Return whether ranks have summed gradients in another order until the step before.

        DDP lays its buckets anew after the first backward. Steps before it cannot be made again,
        and the one that follows is a start.
        """
        if self._had_rebuilt or (reducer := self._reducer()) is None:
            return False
        self._had_rebuilt = torch_reducers.has_rebuilt_buckets(reducer)
        self._is_broken = self._is_broken or self._had_rebuilt
        return self._had_rebuilt

    def needs_start(self, size_bytes: int, most_bytes: int, *, can_run: bool) -> bool:
        """Count a step; return whether it is to be a start.

        Args:
            size_bytes: Of its inputs.
            most_bytes: Of all inputs that are held.
            can_run: Whether its forwards can run again.
        """
        fits = (n for n in LENGTHS if 2 * n * size_bytes <= most_bytes)
        is_due = self.made % next(fits, 1) == 0
        was_broken, self._is_broken = self._is_broken, not can_run
        self.made += 1
        return can_run and (is_due or was_broken)


def _reducer_of(model: nn.Module) -> DistributedDataParallel | None:
    """Return what averages gradients over so many ranks that their order counts."""
    is_ddp = isinstance(model, DistributedDataParallel)
    reducer = model if is_ddp else torch_modules.reducer_of(model)
    if not isinstance(reducer, DistributedDataParallel) or dist.get_world_size() < 3:
        return None
    return reducer


@dataclass(slots=True)
class SoundStep:
    """What is kept of a step that was not left out, beside its forwards.

    Attributes:
        of: What was trained.
        number: Its place among the sound steps of the cell, from 0.
        options: Of the optimizer's groups, as it stepped.
        norms: Of the gradients, as it stepped.
        clips: The arguments of each `clip_grad_norm_` before that.
        why_not: Why it cannot be made again, beside what is known of its forwards.
        states: Of the optimizer, before it; None where it is no start.
    """

    of: Training
    number: int
    options: Options
    norms: Norms
    clips: tuple[Clip, ...]
    why_not: str = ""
    states: States | None = None


def newest_since_older_start(starts: Sequence[bool]) -> int:
    """Return from which on steps stay, oldest first: the older of the two newest starts.

    Args:
        starts: Of each step, whether it is one.
    """
    at = [number for number, is_start in enumerate(starts) if is_start]
    first = 0 if len(at) < 2 else at[-2]
    return max(first, len(starts) - MOST_SOUND)


def to_plain(options: Options) -> list[Mapping[str, Any]]:
    """Return options without what is neither a tensor nor a plain value."""
    kinds = (type(None), bool, int, float, str, torch.Tensor)

    def is_plain(value: Any) -> bool:
        if type(value) in (list, tuple):
            return all(map(is_plain, value))
        return isinstance(value, kinds)

    return [{n: v for n, v in group.items() if is_plain(v)} for group in options]
