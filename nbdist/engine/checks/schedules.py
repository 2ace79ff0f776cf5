"""Report how often the schedules of one optimizer's learning rate step, between two reports.

Schedules count their own steps, so nothing is hooked. Chaining some is torch's documented use: it
is sound where each computes the rate from the one before. Main thread.
"""

import sys
import weakref

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
)

from nbdist.engine.compat import torch_live, torch_modules
from nbdist.engine.steps import step_state
from nbdist.engine.training import training

# They compute a rate from the initial one and their own count, whatever another has made of it.
_OVERWRITING = (CosineAnnealingWarmRestarts, CyclicLR, LambdaLR, OneCycleLR)


class Schedules:
    """The schedules of one optimizer, as the last report found them."""

    def __init__(self) -> None:
        self._steps = 0  # of the optimizer
        self._counts: weakref.WeakKeyDictionary[LRScheduler, tuple[int, int]] = (
            weakref.WeakKeyDictionary()
        )

    def report(self, optimizer: Optimizer) -> dict[str, float]:
        """Return what has happened since the last report.

        Returns:
            `turns`, the steps of one schedule for each step of the optimizer, where that is a whole
            number and a step has one backward; `overwritten`, 1 where two have stepped each time
            and one of them takes no notice of the other. Nothing without a schedule.
        """
        found = [
            one
            for one in torch_live.here.live(LRScheduler)
            if getattr(one, "optimizer", None) is optimizer
        ]
        if not found and not self._counts:
            return {}
        counted = step_state.here().steps.get(optimizer)
        steps = counted.whole if counted is not None else 0
        return self.since(found, steps)

    def since(self, found: list[LRScheduler], steps: int) -> dict[str, float]:
        """Return it of these schedules, now that the optimizer has made so many steps."""
        made, self._steps = steps - self._steps, steps
        asked = [(one, self._turns_of(one)) for one in found]
        turned = {one: turns for one, turns in asked if turns is not None}
        for one in found:  # a chain does not count: it steps all that it has
            inner = [turned.get(each) for each in torch_modules.schedules_in(one)]
            if one not in turned and inner and len(set(inner)) == 1 and inner[0] is not None:
                turned[one] = inner[0]
        if made <= 0 or not turned:
            return {}
        most = max(turned.values())
        values = {"turns": most / made} if most % made == 0 and _has_one_backward() else {}
        if values.get("turns") == _ranks() and "accelerate.scheduler" in sys.modules:
            values = {}  # Accelerator's own schedule steps once for each rank, by design
        together = [one for one in _outermost(found) if turned.get(one) == made]
        return values | {"overwritten": float(_overwrites(together))}

    def _turns_of(self, one: LRScheduler) -> int | None:
        """Return how often a schedule has stepped by itself; None: unknown, or to a set place."""
        count = torch_modules.turns_of(one)
        if count is None:
            return None
        before = self._counts.get(one)
        self._counts[one] = count
        if before is None or count[0] - before[0] != count[1] - before[1]:
            return None
        return count[0] - before[0]


def _has_one_backward() -> bool:
    return training.here.newest_backwards() == 1


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _outermost(found: list[LRScheduler]) -> list[LRScheduler]:
    """Return those that no other one has: what has one answers for its rate."""
    held = set()
    for one in found:
        for value in vars(one).values():
            inner = value if isinstance(value, list | tuple) else (value,)
            held |= {id(each) for each in inner if isinstance(each, LRScheduler)}
    return [one for one in found if id(one) not in held]


def _overwrites(together: list[LRScheduler]) -> bool:
    """Return whether one of torch's own schedules takes no notice of another one."""
    own = [one for one in together if type(one).__module__ == LRScheduler.__module__]
    return len(own) > 1 and any(map(_computes_alone, own))


def _computes_alone(one: LRScheduler) -> bool:
    """Return whether a schedule takes no notice of the present rate, nor does any that it has."""
    inner = torch_modules.schedules_in(one)
    return all(map(_computes_alone, inner)) if inner else type(one) in _OVERWRITING
