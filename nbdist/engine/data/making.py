"""Make a batch and tell of it: where its time went, and which samples could not be loaded.

What a loader's iterator asks for samples, and what puts them together, stand here around the
user's own, in a worker or in the rank itself. What they tell travels with the batch
(`compat.torch_loaders`); neither dataset nor collate function sees any of it.

The time that making a batch takes is split into `PARTS`:

- *read* and *decode*: of files and tables, whose groups are read ahead: waiting for the storage,
  and the processor time until their samples are columns; of a stream *read* is all that it takes;
- *transform*: what is done to each sample by the function of that name;
- *fetch*: the rest of what the dataset's items took. All of it where the dataset is the user's own,
  for what reads there cannot be distinguished from what transforms;
- *collate*: samples put together as a batch;
- *copy*: the batch pinned, and on its way from a worker, as far as the loop waited for that.

It is work, not waiting: of threads that read ahead it counts too, and of workers each one's.

Threads: `part` and `reading` on any; the rest on the one that makes batches.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns, thread_time_ns
from traceback import format_exception
from typing import Any, Protocol

from torch.utils.data import get_worker_info

from nbdist.engine.compat import torch_loaders
from nbdist.engine.compat.torch_loaders import BatchReport, Made, SampleFault
from nbdist.engine.data import generators
from nbdist.engine.data.batches import Seeds
from nbdist.engine.kernel.ipython import tracebacks
from nbdist.shared import background
from nbdist.shared.error_text import named
from nbdist.shared.errors import NBDistError

PARTS = ("read", "decode", "transform", "fetch", "collate", "copy")


class Timed:
    """The parts of making the next batches that threads of one process have timed so far."""

    def __init__(self) -> None:
        # By the thread that did it. A deque, not a dict: appending is atomic, and a lock that
        # another thread holds while a worker is forked would never be released there.
        self._noted: deque[tuple[int, str, int]] = deque(maxlen=100_000)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what is done within as this part of making the next batch.

        Args:
            name: Of `PARTS`. Do not nest them: each counts all that it holds.
        """
        began_ns = perf_counter_ns()
        try:
            yield
        finally:
            self._noted.append((threading.get_ident(), name, perf_counter_ns() - began_ns))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count what is done within as read and decode: what waits, and what takes processor time.

        One thread does both, and few files tell them apart otherwise. Time in which the thread had
        no core is neither.
        """
        began_ns, before = perf_counter_ns(), background.thread_ns()
        try:
            yield
        finally:
            took_ns, now = perf_counter_ns() - began_ns, background.thread_ns()
            worked_ns = delayed_ns = 0
            if now is not None and before is not None:
                worked_ns, delayed_ns = now[0] - before[0], now[1] - before[1]
            me = threading.get_ident()
            self._noted.append((me, "decode", min(took_ns, worked_ns)))
            self._noted.append((me, "read", max(0, took_ns - worked_ns - delayed_ns)))

    def add_noted(self, parts_ns: dict[str, int]) -> int:
        """Add what was noted so far to a batch's parts; return how much of it this thread did."""
        own_ns, me = 0, threading.get_ident()
        while self._noted:
            thread, name, took_ns = self._noted.popleft()
            parts_ns[name] = parts_ns.get(name, 0) + took_ns
            own_ns += took_ns if thread == me else 0
        return own_ns

    def forget(self) -> None:
        """Forget what was noted, in a worker: what the rank has noted is for the rank to tell."""
        self._noted.clear()


class Portion(Protocol):
    """One rank's samples of a batch, as a sampler gives them: by index, or as they were read."""

    @property
    def seed(self) -> Seeds:
        """What random numbers follow from."""

    def __len__(self) -> int: ...

    def one(self, nth: int) -> Any:
        """Return a portion of one of them."""

    def name(self, nth: int) -> int:
        """Return its number in the dataset."""

    def others(self) -> Iterator[tuple[int, Any]]:
        """Yield portions of one sample that may stand in for all of these, and which they are.

        Counted over the whole batch.
        """


@dataclass(slots=True)
class _Fetched:
    """Samples that were fetched, and what is said of it so far."""

    samples: Any
    report: BatchReport
    cpu_began_ns: int = field(default_factory=thread_time_ns)
    ended_ns: int = 0


class Items:
    """A map-style dataset, asked for all samples of a batch at once, and timed.

    A sample that raises is named; with `skips` it is left out.

    A worker draws again for each batch, by the batch's place in the epoch: which worker makes it,
    and what that has made before, are others after a fault.
    """

    def __init__(self, dataset: Any, skips: bool, seed: int | None = None) -> None:
        """Stand around a dataset.

        Args:
            dataset: The user's.
            skips: Leave out a sample that raises.
            seed: For what workers draw, in place of the loader's.
        """
        self._dataset = dataset
        self._skips = skips
        self._seed = seed

    @property
    def dataset(self) -> Any:
        """The user's."""
        return self._dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, portion: Portion) -> _Fetched:
        """Return the samples that could be loaded, and what is said of them."""
        if get_worker_info() is not None:
            seeds = portion.seed
            own = seeds if self._seed is None else seeds._replace(loader=self._seed)
            generators.seed_all(own.of_part())
        report = BatchReport(
            skipped=list(getattr(portion, "skipped", ())),
            repeated=list(getattr(portion, "repeated", ())),
        )
        here.add_noted(report.parts_ns)  # this thread may have read a stream for the batch, before
        fetched = _Fetched(None, report)
        began_ns = perf_counter_ns()
        try:
            fetched.samples = self._all_of(portion, report)
        except _Failed as failed:
            report.fault = failed.fault
        fetched.ended_ns = perf_counter_ns()
        own_ns = fetched.ended_ns - began_ns - here.add_noted(report.parts_ns)
        report.parts_ns["fetch"] = max(0, own_ns)
        return fetched

    def _all_of(self, portion: Portion, report: BatchReport) -> Any:
        if hasattr(self._dataset, "__getitems__"):
            try:
                return self._dataset.__getitems__(portion)
            except NBDistError:
                raise
            except Exception as error:
                found = self._one_by_one(portion, report)
                if report.skipped:
                    return found
                # None of them fails alone: it is the batch that does.
                raise _Failed(fault_of(self._dataset, portion, 0, error)) from error
        return self._one_by_one(portion, report)

    def _one_by_one(self, portion: Portion, report: BatchReport) -> list[Any]:
        samples = []
        for nth in range(len(portion)):
            try:
                samples.append(self._sample(portion.one(nth)))
            except NBDistError:
                raise
            except Exception as error:
                fault = fault_of(self._dataset, portion, nth, error)
                if not self._skips:
                    raise _Failed(fault) from error
                fault.exception = None
                report.skipped.append(fault)
        return samples or self._stand_in(portion, report)

    def _sample(self, one: Any) -> Any:
        if not hasattr(self._dataset, "__getitems__"):
            return self._dataset[one[0]]
        (sample,) = self._dataset.__getitems__(one)
        return sample

    def _stand_in(self, portion: Portion, report: BatchReport) -> list[Any]:
        """Return one sample of another rank's part: a rank without any would make all wait."""
        for nth, one in portion.others():
            try:
                found = [self._sample(one)]
            except NBDistError:
                raise
            except Exception:
                continue  # its own rank tells of it
            report.repeated.append(nth)
            return found
        raise _Failed(report.skipped[-1])


class Collate:
    """A collate function that gets what `Items` fetched, and is timed."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, fetched: _Fetched) -> Made:
        """Return the batch, and what is said of it."""
        report = fetched.report
        batch = None if report.fault is not None else self._collate(fetched.samples)
        report.ended_ns = perf_counter_ns()
        report.parts_ns["collate"] = report.ended_ns - fetched.ended_ns
        report.cpu_ns = thread_time_ns() - fetched.cpu_began_ns
        return Made(batch, report)


class Init:
    """What a worker does first: the user's own function, which sees the user's own dataset."""

    def __init__(self, dataset: Any, init: Callable[[int], object] | None) -> None:
        self._dataset = dataset
        self._init = init

    def __call__(self, worker: int) -> None:
        """Begin a worker."""
        here.forget()
        torch_loaders.show_in_worker(self._dataset)
        if self._init is not None:
            self._init(worker)


class _Failed(Exception):
    """A part of a batch cannot be made."""

    def __init__(self, fault: SampleFault) -> None:
        super().__init__(fault.error)
        self.fault = fault


def fault_of(dataset: Any, portion: Portion, nth: int, error: Exception) -> SampleFault:
    """Return what is said of a sample that raised."""
    sample, ask = portion.name(nth), getattr(dataset, "origin_of", None)
    origin = str(ask(sample)) if callable(ask) else ""
    place = tracebacks.place_of(error.__traceback__)
    trace = "".join(format_exception(error))
    return SampleFault(sample, named(error), place, origin, trace, nth, error)


here = Timed()
