"""See that a loop itself sets learning rates that a scheduler sets, too.

Where either has changed them since the step, they tell not which. A scheduler knows the rates that
it has set last: others at a turn's end are the loop's, and where the loop sets them after the
scheduler's step, rates that are still the scheduler's lack it.

Main thread.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim.lr_scheduler import LRScheduler

Optimizer = torch.optim.Optimizer

MOST_GROUPS = 16  # of an optimizer, whose options are followed


@dataclass(slots=True)
class _Seen:
    """The group that a loop has set first, and whether it has set one in each turn since."""

    group: int
    always: bool = True


class TunedByHand:
    """Whose learning rates a loop sets beside a scheduler, and has not since the last step."""

    def __init__(self) -> None:
        self._scheduled: WeakKeyDictionary[Optimizer, list[ref[Any]]] = WeakKeyDictionary()
        self._seen: WeakKeyDictionary[Optimizer, _Seen] = WeakKeyDictionary()

    def watch(self, schedulers: Iterable[Any]) -> None:
        """Watch the optimizers of these; what is known of them stays."""
        self._scheduled.clear()
        for scheduler in schedulers:
            if isinstance(optimizer := getattr(scheduler, "optimizer", None), Optimizer):
                self._scheduled.setdefault(optimizer, []).append(ref(scheduler))

    def is_scheduled(self, optimizer: Optimizer) -> bool:
        """Return whether schedulers alone set its rates, as far as is known."""
        return optimizer in self._scheduled and optimizer not in self._seen

    def turn_ended(self) -> None:
        """Note whose rates are not those of their schedulers."""
        for optimizer, schedulers in list(self._scheduled.items()):
            group = _differing(optimizer, schedulers)
            if group is not None:
                self._seen.setdefault(optimizer, _Seen(group))
            elif optimizer in self._seen:
                self._seen[optimizer].always = False

    def missing(self) -> Iterator[tuple[Optimizer, int, bool]]:
        """Yield optimizers whose rates are a scheduler's, where a loop has set them before.

        With each, its group, and whether the loop has set it in each turn.
        """
        for optimizer, seen in list(self._seen.items()):
            if _differing(optimizer, self._scheduled.get(optimizer, [])) is None:
                yield optimizer, seen.group, seen.always


def _differing(optimizer: Optimizer, schedulers: Iterable[ref[Any]]) -> int | None:
    """Return the first group whose rate none of its schedulers has set.

    None as well where one is no scheduler of torch's: what it has set is not known.
    """
    living = [one for known in schedulers if (one := known()) is not None]
    if not living or not all(isinstance(one, LRScheduler) for one in living):
        return None
    last = [one.get_last_lr() for one in living]
    for at, group in enumerate(optimizer.param_groups[:MOST_GROUPS]):
        known_rates = [rates[at] for rates in last if at < len(rates)]  # a group may be newer
        if isinstance(group["lr"], float) and known_rates and group["lr"] not in known_rates:
            return at
    return None
