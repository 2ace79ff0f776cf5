"""`nbdist.loader`: torch's DataLoader, with every sample once an epoch whatever the ranks.

The samples' order follows from (seed, epoch) alone and is cut into global batches as `batches`
says. Nothing in this depends on a rank but which part it takes, so the same global batches come
on any number of ranks, and the position is one number: samples *consumed* by all ranks together.
Workers fetch ahead, so the position counts what the loop was given, not what was fetched.

After a fault each loader goes back to the last boundary (`trail.py`), and when the failed cell is
run again its loops go on there.

Threads: the loop's. The position is kept by the iterator that the loop drives.
"""

import gc
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from nbdist.engine import boundary, weighting
from nbdist.engine.batches import Shard, cut, mix, part
from nbdist.engine.compat import torch_hooks
from nbdist.engine.trail import Commit, Position, Trail
from nbdist.errors import UsageError

T = TypeVar("T")
Spec = tuple[int, int, bool, int, bool]  # what decides which batches a loader gives

_log = logging.getLogger("nbdist.data")

# Options of torch's DataLoader that say how batches are made: ours to say.
_BY_ITSELF = "the order follows from seed and epoch, and each rank takes its part by itself"
_OURS = {
    "batch_size": "global_batch is the size over all ranks; a rank's part follows from it",
    "sampler": _BY_ITSELF,
    "batch_sampler": _BY_ITSELF,
}


def data_shard() -> Shard:
    """Return this rank's shard of the data: as the newest living layout says, else over all ranks.

    dp and fsdp cut batches; the ranks of one tp group get the same samples. Without a process group
    there is one shard.
    """
    if dist.is_available() and dist.is_initialized():
        return _ask_layout() or _by_rank()
    return Shard(0, 1)


def _by_rank() -> Shard:
    return Shard(dist.get_rank(), dist.get_world_size())


def _no_layout() -> Shard | None:
    """Where layouts are asked until one is made."""
    return None


_ask_layout: Callable[[], Shard | None] = _no_layout


def shard_as(ask: Callable[[], Shard | None]) -> None:
    """Have `ask` say what this rank's shard is; None leaves it to the number of ranks."""
    global _ask_layout
    _ask_layout = ask


def _no_pace() -> float:
    """The samples a second of a rank whose steps nobody watches."""
    return 0.0


_ask_pace: Callable[[], float] = _no_pace


def pace_as(ask: Callable[[], float]) -> None:
    """Have `ask` say how many samples a second this rank works through; 0: not known."""
    global _ask_pace
    _ask_pace = ask


def _measured_weights() -> tuple[float, ...] | None:
    """Return the weights that all ranks' paces ask for, the same on each. Collective."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    shard = data_shard()
    has_gloo = "gloo" in str(dist.get_backend_config())
    mine = torch.tensor([shard.index, _ask_pace()], device="cpu" if has_gloo else "cuda")
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    paces = [(int(index), pace) for index, pace in (one.tolist() for one in everyone)]
    return weighting.from_paces(paces, shard.count)


def is_shared_out(iterator: Any) -> bool:
    """Return whether a DataLoader's iterator gives this rank its own part of the samples."""
    sampler = torch_hooks.sampler_of(iterator)
    return isinstance(sampler, _Batches | DistributedSampler)


class _Batches:
    """The batch sampler: this rank's part of each batch, from a set epoch and position on."""

    def __init__(
        self, samples: int, global_batch: int, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        self.samples = samples
        self.global_batch = global_batch
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.weights: tuple[float, ...] | None = None
        self.epoch = 0
        self.start = 0

    def __len__(self) -> int:
        return len(self.ends(0))

    def ends(self, start: int) -> list[int]:
        """Return where the batches from `start` on end, on as many ranks as there are now."""
        return cut(self.samples, start, self.global_batch, data_shard().count, self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        shard, start = data_shard(), self.start
        order = self._order()
        for end in self.ends(start):
            positions = part(start, end, shard, self.weights)
            if order is None:
                yield list(positions)
            else:
                yield order[positions.start : positions.stop].tolist()
            start = end

    def _order(self) -> torch.Tensor | None:
        if not self.shuffle:
            return None
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        return torch.randperm(self.samples, generator=generator)


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

    def __init__(self, dataset: Dataset[T], batches: _Batches, options: dict[str, Any]) -> None:
        self._batches = batches
        self._consumed = 0  # samples of this epoch that the loop was given, over all ranks
        self._given = 0  # batches of the running loop that it was given
        self._newest = range(0)  # the positions of the newest batch, over all ranks
        self._heed = weighting.Heed()
        self._is_measured = False
        self._is_resumed = False
        self._own_generator = options.get("generator") is None
        if self._own_generator:
            # Workers take their seeds from it. The default generator is seeded alike on all
            # ranks, and would make all of them augment alike.
            options["generator"] = torch.Generator()
        super().__init__(dataset, batch_sampler=batches, **options)
        self._plan: deque[Position | None] = deque()  # of a cell that is run again
        self._trail = Trail(self._position(), _cell.number)
        _live.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _live.add(self)

    @property
    def epoch(self) -> int:
        """The epoch that runs, or that the next `for` begins or goes on with; from 0.

        In a cell that is run again it begins where it began the first time, though passes that are
        done get nothing: a loop over `range(loader.epoch, n)` must come as far as before.
        """
        for ahead, planned in enumerate(self._plan):
            if planned is not None:
                return max(0, planned.epoch - ahead)
        return self._batches.epoch

    @property
    def consumed(self) -> int:
        """Samples of this epoch that loops were given, over all ranks."""
        return self._consumed

    @property
    def batches_left(self) -> int:
        """Batches that the running loop is still to be given, or that the next one will be."""
        return len(self._batches.ends(self._consumed))

    @property
    def weights(self) -> tuple[float, ...] | None:
        """How large each part of a batch is, one number a part; None: all alike.

        Counts from the next `for` on. It is not part of `state_dict`, and changes neither the
        global batches nor the position.
        """
        return self._batches.weights

    @weights.setter
    def weights(self, weights: Sequence[float] | str | None) -> None:
        is_measured = weights == weighting.MEASURED
        self._batches.weights = weighting.checked(
            None if is_measured else weights, data_shard().count, self._batches.global_batch
        )
        self._is_measured = is_measured

    @property
    def share(self) -> float:
        """The size of this rank's part of the newest batch, in units of the mean part.

        In a plain loop, which averages the ranks' gradients, `(loss * loader.share).backward()`
        lets every sample count once; `layout.step` does it by itself.
        """
        self._heed.weigh()
        shard, whole = data_shard(), self._newest
        mine = part(whole.start, whole.stop, shard, self.weights)
        return len(mine) * shard.count / len(whole) if whole else 1.0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin the next epoch, or go on with the one whose state was loaded.

        Raises:
            UsageError: There are not as many weights as parts: `%dist scale` has changed them.
        """
        if self._is_measured:
            self._batches.weights = _measured_weights()
        weighting.checked(self.weights, data_shard().count, self._batches.global_batch)
        if self._plan:
            planned = self._plan.popleft()
            if planned is None:
                self._trail.pass_over(self._position())
                return iter(())
            self._stand_at(planned)
        if not self._is_resumed:
            if self._given > 1:
                self._batches.epoch += 1
            self._consumed = 0
        self._is_resumed = False
        self._given = 0
        self._batches.start = self._consumed
        ends = self._batches.ends(self._consumed)
        if self._own_generator:
            seed = mix(self._batches.seed, self._batches.epoch, data_shard().index)
            self.generator.manual_seed(seed)
        loop = _Loop(self, super().__iter__(), ends)
        self._trail.begin_pass(self._position(), weakref.ref(loop))
        return loop

    def _give(self, end: int) -> None:
        """Count a batch that the loop gets; `end` is where it ends in the epoch."""
        global _newest
        _newest = weakref.ref(self)
        self._newest = range(self._consumed, end)
        self._consumed = end
        self._given += 1
        self._trail.give()
        if self.weights is not None:
            self._heed.give()

    def _position(self) -> Position:
        return Position(self._batches.epoch, self._consumed)

    def _state(self) -> tuple[Position, int, bool]:
        return self._position(), self._given, self._is_resumed

    def _spec(self) -> Spec:
        b = self._batches
        return b.samples, b.global_batch, b.shuffle, b.seed, b.drop_last

    def _go_back(self, commit: Commit) -> None:
        """Stand where the loader stood at a boundary; its next loop is another pass, as always."""
        self._batches.epoch, self._consumed = commit.position
        self._given, self._is_resumed = commit.given, commit.is_resumed
        self._trail.committed = commit

    def _stand_at(self, position: Position) -> None:
        """Let the next loop begin there, also where nothing is left of the epoch."""
        self._batches.epoch, self._consumed = position
        self._given = 0
        self._is_resumed = True

    def state_dict(self) -> dict[str, int]:
        """Return the position: the same on every rank, and good for any number of ranks."""
        return {
            "epoch": self._batches.epoch,
            "consumed": self._consumed,
            "seed": self._batches.seed,
            "samples": self._batches.samples,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken: the next `for` gives the rest of that epoch.

        Raises:
            UsageError: The dataset has another number of samples than the state's.
        """
        if state["samples"] != self._batches.samples:
            raise UsageError(
                f"The state is of a dataset with {state['samples']} samples; this one has "
                f"{self._batches.samples}.",
                why="the order of an epoch depends on their number",
                do="resume with the dataset that the state was taken from",
            )
        self._batches.seed = state["seed"]
        self._batches.epoch = state["epoch"]
        self._consumed = state["consumed"]
        self._given = 0
        self._is_resumed = True
        if not self._batches.ends(self._consumed):
            self._tell_left_out()
            self._next_epoch()

    def _tell_left_out(self) -> None:
        left = self._batches.samples - self._consumed
        if left and not self._batches.drop_last and data_shard().index == 0:
            _log.warning(
                "%d samples of epoch %d are left out this once: fewer than the %d ranks that "
                "would share them",
                left,
                self._batches.epoch,
                data_shard().count,
            )

    def _next_epoch(self) -> None:
        self._batches.epoch += 1
        self._consumed = 0
        self._given = 0


class _Loop:
    """One `for` over a loader: torch's iterator, and the count of what the loop was given."""

    def __init__(self, loader: Loader[Any], inner: Iterator[Any], ends: list[int]) -> None:
        self._loader = loader
        self._inner = inner
        self._ends = iter(ends)
        self._is_over = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._inner)
        except StopIteration:
            if not self._is_over:
                self._is_over = True
                self._loader._trail.end_pass()
                self._loader._next_epoch()
            raise
        self._loader._give(next(self._ends))
        return batch


def loader(
    dataset: Any,
    *,
    global_batch: int,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    weights: Sequence[float] | str | None = None,
    **options: Any,
) -> Loader[Any]:
    """Return a DataLoader over this rank's parts of global batches of `dataset`.

    Every sample comes exactly once an epoch on exactly one rank. The epoch counts by itself; the
    order follows from (seed, epoch). `state_dict` and `load_state_dict` resume exactly, in the
    middle of an epoch and on another number of ranks too.

    Args:
        dataset: Anything with a length and items by index.
        global_batch: Samples in a batch over all ranks together.
        shuffle: A new order each epoch; False keeps the dataset's order.
        seed: Decides the order, and with epoch and rank the seeds of workers.
        drop_last: Leave out a last batch that is not full.
        weights: One number a rank (of those that share a batch), such as `[1, 0.5]` where rank 1
            is half as fast: parts are proportional to it, a sample each at least. Gradients must
            be weighed then, by `layout.step` or by `loader.share`. "measured" takes the ranks'
            own pace in their last 50 steps, whatever they trained; it is agreed anew when a loop
            begins, which all ranks must do together then. Parts are equal until it is known, and
            where ranks differ by less than a tenth. None shares equally.
        options: The other options of `torch.utils.data.DataLoader`.

    Raises:
        UsageError: A dataset without length or index, fewer samples than ranks, weights that do
            not fit, or an option that says how batches are made.
    """
    for name, why in _OURS.items():
        if name in options:
            raise UsageError(
                f"nbdist.loader takes no {name}.", why=why, do="leave it out; give global_batch"
            )
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise UsageError(
            f"nbdist.loader needs a dataset with a length and items by index, and "
            f"{type(dataset).__name__} has none.",
            why="a stream cannot be cut so that every sample comes once, in a known order",
            do="make it a list or a map-style Dataset, or give the stream to torch's DataLoader",
        )
    if dist.is_initialized() and data_shard() != _by_rank():
        gc.collect()  # a layout that only a reference cycle keeps says nothing of what comes
    ranks, samples = data_shard().count, len(dataset)
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < ranks:
        raise UsageError(
            f"global_batch={global_batch!r} gives {ranks} ranks nothing to share.",
            why="it counts the samples of a batch over all ranks, and each needs at least one",
            do=f"use a whole number of {ranks} or more, best a multiple of {ranks}",
        )
    if samples < ranks or (drop_last and samples < global_batch):
        raise UsageError(
            f"The dataset has {samples} samples: too few for {ranks} ranks and a global batch of "
            f"{global_batch}.",
            do="use more samples, fewer ranks, or a smaller batch",
        )
    made = Loader(dataset, _Batches(samples, global_batch, shuffle, seed, drop_last), options)
    made.weights = weights
    _cell.add(made)
    return made


# ---- Cells, boundaries and faults ---------------------------------------------------------------

_Mark = list[tuple[Trail, Commit]]
_Planned = tuple[Spec, list[Position | None]]


@dataclass(frozen=True, slots=True)
class _Again:
    """How a cell is run again, also when others have run since.

    `made` are the loaders that the cell makes, `live` those that were there before it, each with
    where its passes go on.
    """

    number: int
    goes_on: bool
    has_stepped: bool
    made: list[_Planned]
    live: list[tuple["weakref.ref[Loader[Any]]", list[Position | None], Commit]]
    began: boundary.Mark | None


@dataclass
class _Cell:
    """The loaders of the cell that runs, or has just ended. `number` counts the session's cells."""

    number: int = 0
    made: list[tuple[Spec, Trail]] = field(default_factory=list)
    inherited: list[_Planned] = field(default_factory=list)
    # A loader that only its loop held would go with the exception, and its position with it.
    newest: "deque[Loader[Any]]" = field(default_factory=lambda: deque(maxlen=16))
    taken_over: _Again | None = None  # in a newcomer, which has not run it
    repeats: _Again | None = None  # as which this cell was begun

    def add(self, new: Loader[Any]) -> None:
        """Note a loader that this cell makes; run again, the cell makes it go on."""
        spec, nth = new._spec(), len(self.made)
        self.made.append((spec, new._trail))
        self.newest.append(new)
        if nth < len(self.inherited) and self.inherited[nth][0] == spec:
            new._plan.extend(self.inherited[nth][1])

    def again(self) -> _Again:
        """Return how it would be run again."""
        if self.taken_over is not None:
            return self.taken_over
        if self.repeats is not None and not boundary.has_stepped():
            # It came to nothing: what held before it still does.
            return replace(self.repeats, number=self.number)
        return _Again(
            self.number,
            boundary.goes_on(),
            boundary.has_stepped(),
            [(spec, trail.plan()) for spec, trail in self.made],
            [(weakref.ref(one), one._trail.plan(), one._trail.began) for one in list(_live)],
            boundary.here().cell_began,
        )


def begin_cell(number: int, *, failed: int | None, is_retry: bool) -> str | None:
    """Let loops begin as always, or, in a cell that is run again, go on where they stood.

    They go on when what was trained goes on: when the optimizers that stepped were there before
    the cell that failed. Those that it makes anew start over, and so do the loops.

    Args:
        number: The cell's, in the session.
        failed: The cell that failed last, and has not gone well since. A rank on which it ended
            well learns so that it failed elsewhere. None: there is none.
        is_retry: The cell is that one, run again.

    Returns:
        What was decided, for people, where something was.
    """
    global _cell, _again, _newest
    _newest = None
    if _again is None or _again.number != failed:
        _again = _cell.again() if _cell.number == failed else None
    again = _again if is_retry else None
    _cell = _Cell(number, repeats=again)
    for live in list(_live):
        live._plan.clear()
    line = None if again is None else _prepare(again)
    for live in list(_live):
        live._trail.begin_cell(*live._state(), number)
    return line


def _prepare(again: _Again) -> str | None:
    """Let every loader stand where the cell goes on; returns where, for people."""
    if not again.goes_on:
        boundary.start_over(again.began)
        for where, _, began in again.live:
            if (live := where()) is not None:
                live._go_back(began)
        if not again.has_stepped:
            return None
        return "The cell starts over: it makes its optimizer anew, and loops begin where they did."
    _cell.inherited = again.made
    for where, plan, _ in again.live:
        if (live := where()) is not None:
            live._plan.extend(plan)
    plans = [*(plan for _, plan in again.made), *(plan for _, plan, _ in again.live)]
    ends = {plan[-1] for plan in plans if plan}
    standing = sorted(f"sample {p.consumed:,} of epoch {p.epoch}" for p in ends if p is not None)
    return f"The cell goes on: its loader stands at {', '.join(standing)}." if standing else None


_Handed = tuple[int, bool, bool, list[_Planned], list[tuple[Loader[Any], Any, Commit]]]


def hand_over() -> list[_Handed]:
    """Return what a newcomer must know to run a cell again: the last one, or one that failed."""
    return [
        (
            again.number,
            again.goes_on,
            again.has_stepped,
            again.made,
            [(one, plan, began) for where, plan, began in again.live if (one := where())],
        )
        for again in (_cell.again(), _again)
        if again is not None
    ]


def take_over(handed: list[_Handed]) -> None:
    """Know, in a newcomer, what `hand_over` told on the rank that it was cloned from."""
    global _again
    last, *failed = [
        # The random numbers with which the cell began were the other rank's.
        _Again(
            number, goes_on, has_stepped, made, [(weakref.ref(o), p, b) for o, p, b in live], None
        )
        for number, goes_on, has_stepped, made, live in handed
    ]
    _cell.number, _cell.taken_over = last.number, last
    _again = failed[0] if failed else None


def weigh_newest() -> None:
    """Note that the newest batch's gradient is weighed by its part: `layout.step` does."""
    if _newest is not None and (newest := _newest()) is not None:
        newest._heed.weigh()


def count_copied() -> None:
    """Note that this rank has copied the step that it had lost: its batches are trained on."""
    for live in list(_live):
        live._trail.count_copied()


def _take() -> _Mark:
    """Note every loader's position: an optimizer has stepped on what was given."""
    if _newest is not None and (newest := _newest()) is not None:
        newest._heed.step()
    return [(live._trail, live._trail.commit(*live._state())) for live in list(_live)]


def _restore(mark: _Mark) -> None:
    """Put every loader back where it stood at a boundary."""
    commits = {id(trail): commit for trail, commit in mark}
    for live in list(_live):
        commit = commits.get(id(live._trail))
        if commit is not None:
            live._go_back(commit)


_cell = _Cell()
_again: _Again | None = None
_live: "weakref.WeakSet[Loader[Any]]" = weakref.WeakSet()
_newest: "weakref.ref[Loader[Any]] | None" = None  # the loader that gave the newest batch
boundary.also(_take, _restore)
