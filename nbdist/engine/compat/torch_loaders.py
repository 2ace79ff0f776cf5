"""A DataLoader's iterators that open what its batches travel in: a batch, and word of its making.

One of the modules that hold what nbdist uses of torch's private parts. torch's iterators are
subclassed where they take a batch from their dataset or workers, so that nothing behind them, hooks
on `next` among them, sees what batches travel in. `check()` says what a new torch has moved. Tried
with torch 2.13.0 (CPU).
"""

import copy
import signal
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from time import perf_counter_ns
from typing import Any

import torch
import torch.utils.data.dataloader as dataloader
from torch.utils.data import DataLoader
from torch.utils.data._utils import pin_memory, signal_handling, worker


def check() -> list[str]:
    """Return what this torch lacks of what nbdist's loaders use."""
    wanted: list[tuple[Any, tuple[str, ...]]] = [
        (dataloader, ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter")),
        (dataloader._SingleProcessDataLoaderIter, ("_next_data",)),
        (
            dataloader._MultiProcessingDataLoaderIter,
            ("_next_data", "_shutdown_workers", "_mark_worker_as_unavailable"),
        ),
        (DataLoader, ("_get_iterator",)),
        (pin_memory, ("pin_memory",)),
        (signal_handling, ("_error_if_any_worker_fails", "_set_SIGCHLD_handler")),
        (worker, ("_worker_info", "WorkerInfo")),
    ]
    return [
        f"torch {torch.__version__}: {getattr(owner, '__name__', owner)}.{name} is gone"
        for owner, names in wanted
        for name in names
        if not hasattr(owner, name)
    ]


@dataclass(slots=True)
class SampleFault:
    """A sample that could not be loaded: plain text, for it may come from another process.

    Attributes:
        sample: Its index in the dataset.
        error: The exception in one line, such as "ValueError: bad pixel".
        place: The innermost line of the user's own that raised it; "" where there is none.
        origin: File and row group, where the dataset knows them; else "".
        traceback: The exception's, as Python prints it.
        nth: Which one of the rank's part of the batch it was.
        exception: Itself, where it was raised in this process.
    """

    sample: int
    error: str
    place: str = ""
    origin: str = ""
    traceback: str = ""
    nth: int = 0
    exception: BaseException | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleFault, (
            *(self.sample, self.error, self.place, self.origin, self.traceback),
            self.nth,
        )


@dataclass(slots=True)
class BatchReport:
    """What is said of how a batch was made.

    Attributes:
        parts_ns: Nanoseconds by the names of `making.PARTS`.
        cpu_ns: Processor time of the thread that made it.
        ended_ns: When it was made, by `perf_counter_ns`; Linux and macOS have one clock for all
            processes.
        skipped: Samples that were left out of it.
        repeated: Which samples of the whole batch, of other ranks' parts, stand in for this one.
        fault: Why there is no batch.
    """

    parts_ns: dict[str, int] = field(default_factory=dict)
    cpu_ns: int = 0
    ended_ns: int = 0
    skipped: list[SampleFault] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    fault: SampleFault | None = None


class Made:
    """A batch on its way from where it is made to the loop."""

    __slots__ = ("batch", "report")

    def __init__(self, batch: Any, report: BatchReport) -> None:
        self.batch = batch
        self.report = report

    def pin_memory(self) -> "Made":
        """Pin the batch as torch would have; torch calls it on a thread of its own."""
        began_ns = perf_counter_ns()
        self.batch = pin_memory.pin_memory(self.batch)
        parts = self.report.parts_ns
        parts["copy"] = parts.get("copy", 0) + perf_counter_ns() - began_ns
        return self


_DIED = "a worker of this DataLoader has died"


class _InProcess(dataloader._SingleProcessDataLoaderIter):
    nbdist_report: BatchReport | None = None
    nbdist_loader = -1

    def _next_data(self) -> Any:
        return _open(self, super()._next_data(), 0)  # type: ignore[no-untyped-call]


class _OfWorkers(dataloader._MultiProcessingDataLoaderIter):
    nbdist_report: BatchReport | None = None
    nbdist_loader = -1
    nbdist_add: Callable[[dict[str, int]], object]
    nbdist_has_died = False  # one of its workers
    nbdist_waits = False  # for a batch, on the main thread

    def _next_data(self) -> Any:
        asked_ns = perf_counter_ns()
        if self.nbdist_has_died:
            raise RuntimeError(_DIED)
        self.nbdist_waits = threading.current_thread() is threading.main_thread()
        try:
            made = super()._next_data()  # type: ignore[no-untyped-call]
        finally:
            self.nbdist_waits = False
        return _open(self, made, asked_ns)

    # A worker that is killed may hold the lock of the event that all share: whoever asks or sets it
    # then waits without an end. So this process takes another event, and the other workers end.

    def _mark_worker_as_unavailable(self, worker_id: int, shutdown: bool = False) -> None:
        if not shutdown and dead_workers(self):
            self._workers_done_event = torch.multiprocessing.Event()
        super()._mark_worker_as_unavailable(worker_id, shutdown)

    def _shutdown_workers(self) -> None:
        if dead_workers(self):
            self.nbdist_waits = False  # for the deaths that follow
            for one in self._workers:
                one.kill()
                one.join()
            self._workers_done_event = torch.multiprocessing.Event()
        super()._shutdown_workers()


def _open(iterator: Any, made: Any, asked_ns: int) -> Any:
    """Return the batch in `made`, and keep what is said of it; `asked_ns` is 0 without workers."""
    if not isinstance(made, Made):
        iterator.nbdist_report = None
        return made
    report = iterator.nbdist_report = made.report
    if asked_ns:  # the way from worker to loop, as far as the loop had to wait for it
        on_its_way_ns = max(0, perf_counter_ns() - max(asked_ns, report.ended_ns))
        report.parts_ns["copy"] = max(report.parts_ns.get("copy", 0), on_its_way_ns)
        iterator.nbdist_add(report.parts_ns)
    return made.batch


class Iterators:
    """The iterators of a process that have workers, as long as they live."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[_OfWorkers] = weakref.WeakSet()

    def add(self, made: _OfWorkers) -> None:
        """Note one whose workers have just started."""
        self._alive.add(made)
        self._hold_back_deaths()

    def _hold_back_deaths(self) -> None:
        """Let a worker's death be raised where the loop asks for a batch, and nowhere else.

        torch's handler of SIGCHLD raises in the midst of whatever the main thread does.
        """
        native = signal.getsignal(signal.SIGCHLD)
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or not callable(native) or getattr(native, "is_of_nbdist", False):
            return

        def handler(number: int, frame: Any) -> None:
            raised: RuntimeError | None = None
            try:
                native(number, frame)  # first: it knows no worker that was asked how it ended
            except RuntimeError as error:  # it tells of one death, and forgets it
                raised = error
            died = [one for one in list(self._alive) if dead_workers(one)]
            for one in died:
                one.nbdist_has_died = True
            if any(one.nbdist_waits for one in died) or (raised is not None and not died):
                raise raised or RuntimeError(_DIED)

        handler.is_of_nbdist = True  # type: ignore[attr-defined]
        signal.signal(signal.SIGCHLD, handler)


def report_of(iterator: Any) -> BatchReport | None:
    """Return the report of the batch that a DataLoader's iterator gave last, if there is one."""
    report = getattr(iterator, "nbdist_report", None)
    return report if isinstance(report, BatchReport) else None


def loader_of(iterator: Any) -> int:
    """Return the number of the loader that an iterator belongs to; -1 of torch's own."""
    return int(getattr(iterator, "nbdist_loader", -1))


def next_unwatched(iterator: Any) -> Any:
    """Return an iterator's next batch past what watches `next`."""
    return iterator._next_data()


def iterator_of(
    loader: DataLoader[Any],
    dataset: Any,
    collate: Callable[..., Any],
    init: Callable[[int], None],
    add: Callable[[dict[str, int]], object],
    number: int = -1,
) -> Any:
    """Return an iterator of `loader` that asks another dataset and collate function.

    The loader keeps its own, which users may read. What `collate` gives may be a `Made`.

    Args:
        loader: Whose batches they are.
        dataset: Asked for samples.
        collate: Puts them together.
        init: Called in each worker with its number.
        add: Adds to the parts of a batch that came from a worker what this process did for it.
        number: What `loader_of` returns of the iterator.
    """
    asked = copy.copy(loader)
    # Past DataLoader's own guard: what it guards is what a loader's sampler was made for.
    asked.__dict__.update(dataset=dataset, collate_fn=collate, worker_init_fn=init)
    if loader.num_workers == 0:
        alone = _InProcess(asked)
        alone.nbdist_loader = number
        return alone
    loader.check_worker_number_rationality()
    made = _OfWorkers(asked)
    made.nbdist_loader, made.nbdist_add = number, add
    here.add(made)
    return made


def show_in_worker(dataset: Any) -> None:
    """Let `torch.utils.data.get_worker_info()` tell of this dataset, in a worker."""
    info: Any = worker._worker_info
    if info is not None:
        worker._worker_info = worker.WorkerInfo(
            id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=dataset
        )


def dead_workers(iterator: Any, wait_s: float = 0.0) -> list[tuple[int, int]]:
    """Return pid and exit code of workers that have died by a signal, or with an error.

    Args:
        iterator: Whose workers they are.
        wait_s: How long to wait for one that is dying: its sockets close before it is gone.
    """
    workers = getattr(iterator, "_workers", ())
    if wait_s and workers:
        closed = connection.wait([one.sentinel for one in workers], wait_s)
        for one in workers:
            if one.sentinel in closed:
                one.join(wait_s)
    return [
        (one.pid, one.exitcode)
        for one in workers
        if not one.is_alive() and one.exitcode not in (None, 0)
    ]


def end_workers(iterator: Any) -> None:
    """End an iterator's workers, as torch does when nothing holds it any more."""
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()


here = Iterators()
