"""A sampler of one's own as the order of all ranks: each iterates it, and takes its parts.

Main thread.
"""

import zlib
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from nbdist.engine.data.batches import mix
from nbdist.engine.data.order.sampler import Batches, Spec
from nbdist.engine.data.order.streams import Own
from nbdist.shared.errors import UsageError


class SamplerBatches(Batches):
    """This rank's part of each batch, in the order that a sampler gives."""

    def __init__(self, sampler: Any, global_batch: int, seed: int, drop_last: bool) -> None:
        """Take a sampler of single samples.

        Args:
            sampler: It has a length; its order follows from its `set_epoch`, where it has that, and
                from what it draws of torch's, Python's and numpy's random numbers.
            global_batch: Samples in a batch.
            seed: With the epoch it decides what the sampler draws, on all ranks.
            drop_last: Leave out a last batch that is not full.

        Raises:
            UsageError: It gives a rank's part, has no length, or another order each time.
        """
        self.sampler = _checked(sampler)
        super().__init__(len(sampler), global_batch, True, seed, drop_last)
        order = self._order(0)
        self.alike["the order of its sampler"] = zlib.crc32(order.numpy().tobytes())
        if not torch.equal(order, self._order(0)):
            raise UsageError(
                f"The order of this {type(sampler).__name__} does not follow from seed and epoch.",
                why="ranks share one order, and resume in its midst: each must find the same again",
                do="draw from torch's, Python's or numpy's global random numbers in __iter__, or "
                "from a generator that set_epoch seeds",
            )

    def spec(self) -> Spec:
        """Return what decides which batches come, the kind of sampler too."""
        return *super().spec(), zlib.crc32(type(self.sampler).__qualname__.encode())

    def samples_of(self, epoch: int) -> torch.Tensor | None:
        """Return the sample at each position of an epoch; None where each stands at one."""
        return self._order(epoch) if self.repeats else None

    def _order(self, epoch: int) -> torch.Tensor:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        with Own().of(mix(self.seed, epoch)):
            order = torch.tensor(list(self.sampler), dtype=torch.int64)
        if len(order) != self.samples:
            raise UsageError(
                f"The sampler gave {len(order):,} samples in epoch {epoch}, and its length is "
                f"{self.samples:,}.",
                why="batches are cut by its length, before it is iterated",
                do="let __len__ say how many samples __iter__ gives",
            )
        self.repeats = self.repeats or len(order.unique()) < len(order)
        return order


def _checked(sampler: Any) -> Any:
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise UsageError(
            "A DistributedSampler gives a rank's part, and nbdist.loader shares out by itself.",
            why="parts of a part would leave samples out",
            do="leave it out, or give the sampler of the whole order",
        )
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator) and not hasattr(sampler, "set_epoch"):
        raise UsageError(
            f"This {type(sampler).__name__} draws its order from a generator of its own.",
            why="that goes on from epoch to epoch, and ranks that resume must find the same order "
            "again, from seed and epoch alone",
            do="leave out the sampler's generator=; the loader's seed= decides what it draws",
        )
    if not (hasattr(sampler, "__len__") and hasattr(sampler, "__iter__")):
        raise UsageError(
            f"This {type(sampler).__name__} is no sampler with a length.",
            why="all ranks cut its order into the same batches, up to its end",
            do="give it __len__ and __iter__, as torch.utils.data.Sampler has them",
        )
    return sampler
