"""Read a stream: a dataset without length and index, iterated from its start in every epoch.

Every rank reads all of it, and draws the same random numbers while it reads; so all have the same
samples in the same order, and come to the end together. Samples are read, and shuffled, a window
at a time: the order follows from (seed, epoch), and resumes within the window.

A stream resumes by its own `state_dict` where it has one, and else by reading again what was given.

Threads: the loop's.
"""

import copy
import itertools
import random
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from nbdist.engine.compat.libraries import hf_datasets
from nbdist.engine.data import generators
from nbdist.engine.data.batches import mix

_SAID_FROM_S = 2.0  # reading again that takes as long is told
_NOTES = 64  # places to resume at; a fault goes back by the batches that workers had fetched


class Note(NamedTuple):
    """The stream's own state, after so many samples of an epoch were read (`consumed`)."""

    epoch: int
    consumed: int
    state: Any


class SampleStream:
    """A dataset to iterate again and again, from the start or from where it can resume."""

    def __init__(self, dataset: Any, shuffle: bool, seed: int, window: int) -> None:
        """Take a dataset.

        Args:
            dataset: An iterable, or a function without arguments that returns one.
            shuffle: Shuffle the samples of each window.
            seed: Decides the order, and what the stream draws.
            window: How many samples are read at once.
        """
        self.dataset = dataset
        self.shuffle, self.seed, self.window = shuffle, seed, window
        self.notes: deque[Note] = deque(maxlen=_NOTES)
        self._fresh = self._state()

    @property
    def has_state(self) -> bool:
        """Whether the stream resumes by a state of its own, and exactly."""
        return (
            hasattr(self.dataset, "state_dict")
            and hasattr(self.dataset, "load_state_dict")
            and not hf_datasets.loses_buffer(self.dataset)
        )

    def read(self, epoch: int, start: int) -> Iterator[tuple[int, Any]]:
        """Iterate the epoch from position `start` on.

        Yields:
            A sample's number in the stream, and the sample.
        """
        first = start // self.window * self.window
        note = self.nearest(epoch, first) or Note(epoch, 0, None)
        random_numbers = Own()
        with random_numbers.of(mix(self.seed, epoch, note.consumed)):
            samples = self._begin(note)
        for at in itertools.count(note.consumed, self.window):
            if at == first:
                self._tell_read_again(first - note.consumed, random_numbers.spent_s)
            with random_numbers.of(mix(self.seed, epoch, at)):
                window = list(itertools.islice(samples, self.window))
            self._note(epoch, at + len(window))
            if at >= first:
                order = list(range(len(window)))
                if self.shuffle:
                    random.Random(mix(self.seed, epoch, at)).shuffle(order)
                for nth in order[max(0, start - at) :]:
                    yield at + nth, window[nth]
            if len(window) < self.window:
                return

    def nearest(self, epoch: int, consumed: int) -> Note | None:
        """Return the last note that is not beyond `consumed` samples of an epoch."""
        fitting = [one for one in self.notes if one.epoch == epoch and one.consumed <= consumed]
        return max(fitting, key=lambda one: one.consumed, default=None)

    def _begin(self, note: Note) -> Iterator[Any]:
        dataset = self.dataset
        if note.state is None:
            if self._fresh is not None:  # one that was left in its midst might go on there
                dataset.load_state_dict(copy.deepcopy(self._fresh))
            self._set_epoch(note.epoch)
        else:
            self._set_epoch(note.epoch)
            dataset.load_state_dict(copy.deepcopy(note.state))
        return iter(dataset if hasattr(dataset, "__iter__") else dataset())

    def _set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def _state(self) -> Any:
        return copy.deepcopy(self.dataset.state_dict()) if self.has_state else None

    def _note(self, epoch: int, consumed: int) -> None:
        if self.has_state:
            self.notes.append(Note(epoch, consumed, self._state()))

    def _tell_read_again(self, samples: int, seconds: float) -> None:
        if samples and seconds >= _SAID_FROM_S:
            why = "no state_dict" if not self.has_state else "no state of that place"
            print(
                f"The stream has {why}: {samples:,} samples were read again, in {seconds:.1f} s, "
                "to go on where it stood."
            )


class Own:
    """Random numbers that a stream or a sampler draws, the same on all ranks; others go on."""

    def __init__(self) -> None:
        self.spent_s = 0.0  # in blocks

    def of(self, seed: int) -> "Own":
        """Have the block draw from `seed` on."""
        self._seed = seed
        return self

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        self._kept = generators.kept()
        self._kept.__enter__()
        generators.seed_all(self._seed)

    def __exit__(self, *_: object) -> None:
        self._kept.__exit__(None, None, None)
        self.spent_s += time.perf_counter() - self._began
