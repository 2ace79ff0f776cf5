"""Match wrapped models, optimizers and schedulers between ranks.

Not by their looks alone: a rank may hold one model more of a class than its peers. What
belongs together is agreed when it is made, without a collective of ours. Ranks make the collectives
of a group in one order, so the number they have made is a moment that all of them share
(`counters.moment`): it names what is made then. DDP's constructor makes collectives itself; of
several optimizers made between the same two collectives, the first of its shapes is the first
everywhere.

Where ranks make different objects between two collectives, their names differ too.
A comparison of ranks ignores, or refuses, what is not found on each: see `decide`.

Main thread only.
"""

from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from nbdist.engine.compat.groups import torch_groups
from nbdist.engine.tap import counters

UNKNOWN = ""  # of what was made while this process was in no group
Optimizer = torch.optim.Optimizer
Names = tuple[str, str]  # among those with the same shapes, and among all of its kind


class Identities:
    """The names of living objects, and how many were made at each moment."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Any, Names] = WeakKeyDictionary()
        # How many were made at a moment, of this generation: earlier ones no longer count.
        self._counts: Counter[tuple[object, ...]] = Counter()
        self._counted_in = -1

    def note(self, made: Any) -> None:
        """Name a DDP, an optimizer or a scheduler, as its constructor ends."""
        kind, group, looks = self._describe(made)
        if group is None or not torch_groups.ranks_of(group):
            return
        generation, collectives = counters.moment(group)
        if generation != self._counted_in:
            self._counts.clear()
            self._counted_in = generation
        moment = (kind, group.group_name, collectives)
        self._counts.update([moment, (*moment, looks)])
        begin = f"{kind} {group.group_name}/{generation}/{collectives}"
        shapes = blake2b(repr(looks).encode(), digest_size=6).hexdigest()
        shapes = f"{shapes}/{self._counts[*moment, looks]}"
        self._names[made] = f"{begin}/{shapes}", f"{begin}/{self._counts[moment]}"

    def of(self, made: Any, *, is_alike: bool = True) -> str:
        """Return an object's name, the same on all ranks that made it together; else UNKNOWN.

        Args:
            made: A DDP, an optimizer or a scheduler.
            is_alike: Whether its parameters have the same shapes on all ranks: not in pipelines.
        """
        names = self._names.get(made)
        return UNKNOWN if names is None else names[0 if is_alike else 1]

    def hand_over(self, objects: Iterable[Any]) -> dict[str, tuple[Any, Names]]:
        """Return objects with their names, for a new rank that gets copies."""
        names = self._names
        return {str(i): (one, names[one]) for i, one in enumerate(objects) if one in names}

    def take_over(self, objects: dict[str, tuple[Any, Names]]) -> None:
        """Name, on a new rank, the copies of what `hand_over` returned; some are placeholders."""
        for one, names in objects.values():
            if isinstance(one, DistributedDataParallel | Optimizer | LRScheduler):
                self._names[one] = names

    def _describe(self, made: Any) -> tuple[str, dist.ProcessGroup | None, tuple[object, ...]]:
        """Return an object's kind, the group whose moments name it, and how it looks."""
        if isinstance(made, DistributedDataParallel):
            return "model", made.process_group, ()
        if isinstance(made, Optimizer):
            return "optimizer", dist.group.WORLD, _looks(made)
        if isinstance(made, LRScheduler):
            return (
                "scheduler",
                dist.group.WORLD,
                (self.of(made.optimizer),),
            )  # which of its optimizer's
        return "", None, ()


def _looks(optimizer: Optimizer) -> tuple[object, ...]:
    """Return what distinguishes optimizers made at one moment: a DTensor counts whole."""
    groups = optimizer.param_groups
    return type(optimizer).__name__, tuple(tuple(p.shape) for g in groups for p in g["params"])


here = Identities()
