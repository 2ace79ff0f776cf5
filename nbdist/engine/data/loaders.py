"""The DataLoader that `nbdist.loader` gives, and the loops over it.

Threads: the loop's.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from nbdist.engine.data import shards, weighting
from nbdist.engine.data.batches import mix, part
from nbdist.engine.data.position import Standing
from nbdist.engine.data.shards import data_shard

T = TypeVar("T")


class Loader(DataLoader[T]):
    """A DataLoader whose batches are this rank's parts of global batches.

    Each `for` over it is the next epoch, also when the one before was left by `break`; only a loop
    left at its first batch was a mere look, and the next one begins the same epoch. After
    `load_state_dict` the next `for` goes on where the state was taken.

    `len` is the number of batches in a whole epoch; `batches_left` that of the loop that runs, or
    would begin now. Make it by `nbdist.loader`.
    """

    # Accelerate's own mark of a loader that is shared out already: `prepare` returns it as it is,
    # where it would else give each rank a part of its part.
    _is_accelerate_prepared = True

    def __init__(self, dataset: Dataset[T], standing: Standing, options: dict[str, Any]) -> None:
        self._standing = standing
        self._is_measured = False
        self._own_generator = options.get("generator") is None
        if self._own_generator:
            # Workers take their seeds from it. The default generator is seeded alike on all
            # ranks, and would make all of them augment alike.
            options["generator"] = torch.Generator()
        super().__init__(dataset, batch_sampler=standing.batches, **options)

    @property
    def epoch(self) -> int:
        """The epoch that runs, or that the next `for` begins or goes on with; from 0.

        In a cell that is run again it begins where it began the first time, though passes that are
        done get nothing: a loop over `range(loader.epoch, n)` must come as far as before.
        """
        return self._standing.epoch

    @property
    def consumed(self) -> int:
        """Samples of this epoch that loops were given, over all ranks."""
        return self._standing.consumed

    @property
    def batches_left(self) -> int:
        """Batches that the running loop is still to be given, or that the next one will be."""
        return len(self._standing.ends())

    @property
    def weights(self) -> tuple[float, ...] | None:
        """How large each part of a batch is, one number a part; None: all alike.

        Counts from the next `for` on. It is not part of `state_dict`, and changes neither the
        global batches nor the position.
        """
        return self._standing.batches.weights

    @weights.setter
    def weights(self, weights: Sequence[float] | str | None) -> None:
        batches, is_measured = self._standing.batches, weights == weighting.MEASURED
        batches.weights = weighting.checked(
            None if is_measured else weights, data_shard().count, batches.global_batch
        )
        self._is_measured = is_measured

    @property
    def share(self) -> float:
        """The size of this rank's part of the newest batch, in units of the mean part.

        In a plain loop, which averages the ranks' gradients, `(loss * loader.share).backward()`
        lets every sample count once; `layout.step` does it by itself.
        """
        self._standing.heed.weigh()
        shard, whole = data_shard(), self._standing.newest
        mine = part(whole.start, whole.stop, shard, self.weights)
        return len(mine) * shard.count / len(whole) if whole else 1.0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin the next epoch, or go on with the one whose state was loaded.

        Raises:
            UsageError: There are not as many weights as parts: `%dist scale` has changed them.
        """
        standing, batches = self._standing, self._standing.batches
        if self._is_measured:
            batches.weights = shards.measured_weights()
        weighting.checked(self.weights, data_shard().count, batches.global_batch)
        if not standing.next_pass():
            return iter(())
        ends = standing.ends()
        if self._own_generator:
            seed = mix(batches.seed, batches.epoch, data_shard().index)
            self.generator.manual_seed(seed)
        loop = Loop(standing, super().__iter__(), ends)
        standing.begin_pass(weakref.ref(loop))
        return loop

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the same on every rank, and good for any number of ranks."""
        return self._standing.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken: the next `for` gives the rest of that epoch.

        Raises:
            UsageError: The dataset has another number of samples than the state's.
        """
        self._standing.load_state_dict(state)


class Loop:
    """One `for` over a loader: torch's iterator, and the count of what the loop was given."""

    def __init__(self, standing: Standing, inner: Iterator[Any], ends: list[int]) -> None:
        self._standing = standing
        self._inner = inner
        self._ends = iter(ends)
        self._is_over = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._standing.ask()
        try:
            batch = next(self._inner)
        except StopIteration:
            if not self._is_over:
                self._is_over = True
                self._standing.end_pass()
            raise
        self._standing.give(next(self._ends))
        return batch
