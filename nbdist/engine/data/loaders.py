"""The DataLoader that `nbdist.loader` gives, and the loops over it.

Threads: the loop's.
"""

import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from nbdist.engine.compat import torch_loaders
from nbdist.engine.data import bad, making, probe, services
from nbdist.engine.data.batches import mix, part
from nbdist.engine.data.generators import own_generators
from nbdist.engine.data.making import Collate, Init, Items
from nbdist.engine.data.order import shards, weighting
from nbdist.engine.data.order.shards import data_shard
from nbdist.engine.data.position.left_out import Skipped
from nbdist.engine.data.position.position import LoaderPosition
from nbdist.engine.data.probe import Probe
from nbdist.engine.data.reading.reader_threads import own_cores
from nbdist.engine.data.sources.source import fingerprint
from nbdist.engine.steps import guard
from nbdist.engine.steps.forwards import GivenBatch
from nbdist.shared.errors import DataError, UsageError

_log = logging.getLogger("nbdist.data")
T = TypeVar("T")
_EXACT = 1 << 53  # below it a float holds each whole number


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

    def __init__(
        self,
        dataset: Dataset[T],
        standing: LoaderPosition,
        options: dict[str, Any],
        made_at: tuple[int, int] = (0, 0),
    ) -> None:
        self._standing = standing
        self._is_measured = False
        self._is_told = False  # of generators that the dataset holds
        self._loops = 0  # that have begun
        self._made_at = made_at
        self._own_generator = options.get("generator") is None
        if self._own_generator:
            # torch seeds workers from it as they start. The default generator would be drawn from.
            options["generator"] = torch.Generator()
        super().__init__(dataset, batch_sampler=standing.batches, **options)
        standing.holder = weakref.ref(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._standing.is_held:  # else this is a copy, such as each pass makes
            self._standing.holder = weakref.ref(self)

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
        return self._standing.batches_left()

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The samples that this rank left out so far, of those it should have given its loops.

        Each with its epoch and why; the first 10,000. Only `on_bad="skip"` leaves any out.
        """
        return self._standing.left_out.all()

    @property
    def weights(self) -> tuple[float, ...] | None:
        """How large each part of a batch is, one number a part; None: all equal.

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

    def probe(self, workers: Sequence[int] | None = None, *, seconds: float = 10.0) -> Probe:
        """Try several numbers of workers; print and return which keeps up with a step.

        Workers make batches that come next, which are thrown away: position, samples and
        random numbers stay as they are on all ranks. All ranks may call it together, and then share
        the cores as in training; one may call it alone.

        Args:
            workers: What to try; by default 0, 1, 2, 4, ... up to the cores that this rank has,
                and four times as many where making a batch mostly waits.
            seconds: About how long it may take, if a batch takes less.

        Raises:
            UsageError: No numbers of workers, no time, or a loader over a stream.
        """
        standing = self._standing
        found = probe.probe(
            self,
            standing.batches,
            standing.consumed,
            cores=own_cores(),
            counts=workers,
            seconds=seconds,
        )
        print(found.sentence())
        return found

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin the next epoch, or go on with the one whose state was loaded.

        It ends the loop before, which raises should it be asked for a batch again.

        Raises:
            UsageError: There are not as many weights as parts: `%dist scale` has changed them.
        """
        standing, batches = self._standing, self._standing.batches
        if self._is_measured:
            batches.weights = shards.measured_weights()
        weighting.checked(self.weights, data_shard().count, batches.global_batch)
        if not standing.next_pass():
            return iter(())
        services.here.tell_loop(self._facts())
        loop = Loop(self)
        standing.begin_pass(weakref.ref(loop))
        return loop

    def _begin(self) -> Iterator[Any]:
        """Return torch's iterator from where the loader stands."""
        batches = self._standing.batches
        batches.start = self._standing.consumed
        if batches.start and self.num_workers:
            self._tell_own_generators()
        if self._own_generator:
            seed = mix(batches.seed, batches.epoch, data_shard().index)
            self.generator.manual_seed(seed)
        return super().__iter__()

    def _tell_own_generators(self) -> None:
        """Say once that workers which begin in mid epoch do not draw as those before them."""
        found = [] if self._is_told else own_generators(self.dataset)
        self._is_told = True
        if found and data_shard().index == 0:
            _log.warning(
                "Workers draw from copies of %s as it was when they began, which is here in the "
                "midst of an epoch: what they draw differs from an undisturbed run. "
                "Do: draw from torch's, Python's or numpy's global random numbers, which follow "
                "from each batch's place.",
                ", ".join(found),
            )

    def _get_iterator(self) -> Any:
        seed = None if self._own_generator else self.generator.initial_seed()
        items = Items(self.dataset, self._standing.batches.skips, seed)
        init = Init(self.dataset, self.worker_init_fn)
        collate = Collate(self.collate_fn)
        add, number = making.here.add_noted, self._standing.number
        return torch_loaders.iterator_of(self, items, collate, init, add, number)

    def _facts(self) -> dict[str, float]:
        """Return what a record of kind "loader" tells, see `wire.Record`."""
        prompt, line = self._made_at
        return {
            "loader": self._standing.number,
            "order": float(fingerprint(map(repr, self._standing.batches.spec())) % _EXACT),
            "prompt": prompt,
            "line": line,
            "workers": self.num_workers,
            "pinned": float(self.pin_memory),
            "persistent": float(self.persistent_workers),
            "cores": own_cores(),
        }

    def _forget_workers(self) -> None:
        """Have the next iterator start workers of its own, also where they persist."""
        self._iterator = None

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

    def __init__(self, loader: Loader[Any]) -> None:
        self._loader = loader
        self._standing = loader._standing
        self._inner: Iterator[Any] | None = loader._begin()
        self._is_over = False
        self._restarts = 0
        loader._loops += 1
        self._nth = loader._loops

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        if self._nth != self._loader._loops:
            raise UsageError(
                "This loop over the loader has ended, for another one over it began.",
                why="a loader has one position, which the newer loop moves",
                do="end one loop before the next, or make a loader for each",
            )
        self._standing.ask()
        while True:
            inner = self._inner = self._loader._begin() if self._inner is None else self._inner
            try:
                batch = next(inner)
                break
            except StopIteration:
                if not self._is_over:
                    self._is_over = True
                    self._standing.end_pass()
                raise
            except DataError:  # of what is read ahead; the next call tries it once more
                self._end(inner)
                raise
            except (RuntimeError, OSError, EOFError) as error:
                self._restart(inner, error)
        report = torch_loaders.report_of(inner)
        if report is not None and report.fault is not None:
            self._raise(report.fault)
        start = self._standing.consumed
        self._standing.give()
        if report is not None and (report.skipped or report.repeated):
            self._leave_out(start, report)
        evidence = guard.here.evidence
        evidence.gave(self._given(batch if evidence.is_on else None))
        return batch

    def _given(self, batch: Any) -> GivenBatch:
        """Return the newest batch, or None for it, with what its samples are named by later."""
        standing = self._standing
        batches, epoch, part = standing.batches, standing.batches.epoch, standing.part
        return GivenBatch(batch, epoch, part, lambda: batches.rows(epoch, part))

    def _restart(self, inner: Iterator[Any], error: Exception) -> None:
        """Let other workers go on where these died or hung; or tell of it."""
        # A batch that a worker had made cannot be taken over from it when it is gone: its tensors
        # come over a socket of the worker's.
        wait_s = 0.0 if isinstance(error, RuntimeError) else 1.0
        how = bad.end_of_workers(error, torch_loaders.dead_workers(inner, wait_s))
        if how is None:
            raise error
        self._end(inner)
        self._restarts += 1
        if self._restarts > bad.MOST_RESTARTS:
            raise bad.of_workers(how, error, self._restarts) from error
        bad.tell_restart(how, self._restarts, self._standing.consumed)

    def _end(self, inner: Iterator[Any] | None) -> None:
        self._inner = None
        torch_loaders.end_workers(inner)
        self._loader._forget_workers()

    def _raise(self, fault: torch_loaders.SampleFault) -> NoReturn:
        """Tell of a sample that cannot be loaded; the next call tries it once more."""
        batches = self._standing.batches
        fault.origin = fault.origin or batches.where(fault.sample)
        self._end(self._inner)
        cause = fault.exception or bad.ElsewhereError.of(fault)
        raise bad.of_sample(fault, skips=batches.skips) from cause

    def _leave_out(self, start: int, report: torch_loaders.BatchReport) -> None:
        """Note what was left out of the newest batch, which begins at position `start`."""
        standing = self._standing
        epoch = standing.batches.epoch
        skipped = [Skipped(epoch, one.sample, one.error.strip()) for one in report.skipped]
        standing.left_out.add(start, skipped, len(report.repeated))
        standing.leave_out([one.nth for one in report.skipped], report.repeated)
