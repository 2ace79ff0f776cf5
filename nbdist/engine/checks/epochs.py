"""Notice a pass that trains in the order of an earlier one: a sampler's epoch was not set.

A sampler or a loader that is made anew for each pass counts from epoch 0 each time. So passes are
known by what decides their order, by their dataset, and by the optimizer that both have trained:
two trainings of one cell are to get the same order. Main thread.
"""

import weakref
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from nbdist.engine.compat import torch_hooks
from nbdist.engine.data.making import Items
from nbdist.engine.data.order.sampler import Batches, SourceBatches
from nbdist.engine.data.samples import Transformed
from nbdist.engine.training.cell import Pass

Held = weakref.ref[Any] | None


@dataclass(frozen=True, slots=True)
class _Begun:
    """A pass that has trained an optimizer; `groups` are new ones where its state was loaded."""

    of: Pass
    ended_before: int
    sampler: Held
    dataset: Held
    groups: list[dict[str, Any]]

    @property
    def is_over(self) -> bool:
        """Whether it came to its end: one that did not may have been a look at a batch."""
        return self.of.ended > self.ended_before


class Epochs:
    """The passes of a cell over data that is shuffled."""

    def __init__(self) -> None:
        self._newest: tuple[Held, int] = (None, 0)
        self._begun: weakref.WeakKeyDictionary[Optimizer, dict[Hashable, list[_Begun]]]
        self._begun = weakref.WeakKeyDictionary()

    def repeated(
        self, optimizer: Optimizer | None, iterator: Any, one_pass: Pass
    ) -> dict[str, float]:
        """Return how a pass repeats an earlier one; nothing where it does not.

        Args:
            optimizer: The one that the pass trains.
            iterator: A DataLoader's, that was used last.
            one_pass: Its newest pass.

        Returns:
            `same_epoch`, 1; `made_anew`, 1 where its sampler is another one than the pass before
            had; `own_loader`, 1 of nbdist's loaders.
        """
        known, began_at = self._newest
        if optimizer is None or iterator is None:
            return {}
        if known is not None and known() is iterator and began_at == one_pass.began_at:
            return {}
        self._newest = weakref.ref(iterator), one_pass.began_at
        sampler = torch_hooks.sampler_of(iterator)
        order = _order_of(sampler)
        if order is None:
            return {}
        begun = _Begun(
            one_pass,
            one_pass.ended,
            _weakly(sampler),
            _weakly(_data_of(iterator, sampler)),
            optimizer.param_groups,
        )
        passes = self._begun.setdefault(optimizer, defaultdict(list))[order]
        earlier = [one for one in passes if _is_alike(one, begun)]
        passes.append(begun)
        if not (len(earlier) > 1 or any(one.is_over for one in earlier)):
            return {}
        return {
            "same_epoch": 1.0,
            "made_anew": float(_target(earlier[-1].sampler) is not sampler),
            "own_loader": float(isinstance(sampler, Batches)),
        }


def _order_of(sampler: Any) -> Hashable | None:
    """Return what decides the order that a sampler gives; None where nothing is known to."""
    if isinstance(sampler, DistributedSampler):
        if not sampler.shuffle or type(sampler).__iter__ is not DistributedSampler.__iter__:
            return None
        return sampler.seed, sampler.epoch, sampler.num_replicas, sampler.rank
    if type(sampler) in (Batches, SourceBatches) and sampler.shuffle:
        return *sampler.spec(), sampler.epoch, sampler.start
    return None


def _data_of(iterator: Any, sampler: Any) -> Any:
    """Return the user's dataset; of files and tables None, which their order names."""
    if isinstance(sampler, SourceBatches):
        return None
    dataset = torch_hooks.dataset_of(iterator)
    if isinstance(dataset, Items):
        dataset = dataset.dataset
    return dataset.dataset if isinstance(dataset, Transformed) else dataset


def _is_alike(one: _Begun, other: _Begun) -> bool:
    """Whether two passes of one order are over the same data, and train on."""
    if one.groups is not other.groups:
        return False
    sampler, dataset = _target(other.sampler), _target(other.dataset)
    if sampler is not None and _target(one.sampler) is sampler:
        return True
    if isinstance(sampler, SourceBatches):
        return True
    return dataset is not None and _target(one.dataset) is dataset


def _weakly(one: Any) -> Held:
    try:
        return weakref.ref(one)
    except TypeError:  # as of a list
        return None


def _target(held: Held) -> Any:
    return None if held is None else held()
