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

Optimizer = torch.optim.Optimizer

_MOST_GROUPS = 4


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
    """Return the first group whose rate none of its schedulers has set."""
    last = [one.get_last_lr() for known in schedulers if (one := known()) is not None]
    rates = [group["lr"] for group in optimizer.param_groups[:_MOST_GROUPS]]
    for at, rate in enumerate(rates):
        if isinstance(rate, float) and last and all(rate != one[at] for one in last):
            return at
    return None
