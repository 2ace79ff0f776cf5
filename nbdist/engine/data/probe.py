"""`Loader.probe`: try several numbers of workers, and say which keeps up. Main thread.

Batches that the loader will give are made by real workers, and thrown away. Nothing of it happens
in this process, so that position, random numbers and the dataset stay as they are: what a loop
without workers would take is the time that one worker works on a batch.
"""

import copy
import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader

from nbdist.engine.compat import torch_loaders
from nbdist.engine.data import making, services
from nbdist.engine.data.making import PARTS, Collate, Init, Items
from nbdist.engine.data.order.sampler import Batches
from nbdist.shared.errors import UsageError
from nbdist.shared.text import aligned, figure

GAIN = 0.9  # what is not below this share of a time is no faster
MOST_WORKERS = 32
WAITS = 0.5  # a making that uses less of its time on a processor mostly waits


@dataclass(frozen=True, slots=True)
class Tried:
    """One number of workers, and the seconds from one batch to the next when nothing else waits."""

    workers: int
    batch_s: float


@dataclass(frozen=True, slots=True)
class Probe:
    """What was found out about a loader.

    Attributes:
        rows: What was tried, fewest workers first.
        parts: Seconds that making one batch takes, by the names of `making.PARTS`.
        cpu_s: The processor time of that.
        cores: How many cores this rank may use.
        now: The loader's own `num_workers`.
        rest_s: Seconds of a step without waiting for data, of recent steps; 0 where not known.
    """

    rows: tuple[Tried, ...]
    parts: dict[str, float] = field(default_factory=dict)
    cpu_s: float = 0.0
    cores: float = 1.0
    now: int = 0
    rest_s: float = 0.0

    @property
    def best(self) -> int:
        """The fewest workers that keep up with a step, or else are about as fast as any."""
        fastest = min(row.batch_s for row in self.rows)
        enough_s = max(self.rest_s, fastest / GAIN)
        return next(row.workers for row in self.rows if row.batch_s <= enough_s)

    def __repr__(self) -> str:
        head = [["workers", "s a batch"]]
        rows = [[str(row.workers), figure(row.batch_s)] for row in self.rows]
        return "\n".join(aligned(head + rows, (True, True)))

    def _of(self, workers: int) -> float:
        known = [row for row in self.rows if row.workers <= workers] or list(self.rows)
        return known[-1].batch_s

    def sentence(self) -> str:
        """Return what to do, with the numbers behind it."""
        now_s, best_s = self._of(self.now), self._of(self.best)
        made = ", ".join(f"{part} {_s(s)}" for part, s in self.parts.items() if s > 0)
        why = f"making a batch takes {_s(sum(self.parts.values()))} ({made})"
        step = f", a step without its data {_s(self.rest_s)}" if self.rest_s else ""
        if self.rest_s and now_s <= self.rest_s:
            return f"num_workers={self.now} keeps up: {_s(now_s)} a batch{step}."
        if best_s < GAIN * now_s:
            verb = "" if not self.rest_s or best_s <= self.rest_s else ", and that does not keep up"
            return (
                f"workers {self.now} to {self.best}: {_s(now_s)} to {_s(best_s)} a batch{step}"
                f"{verb}; {why}. Use num_workers={self.best}."
            )
        return (
            f"More workers do not help: {_s(now_s)} a batch with {self.now}, "
            f"{_s(min(row.batch_s for row in self.rows))} at best{step}; {why}, "
            f"{_s(self.cpu_s)} of it on a processor, and this rank has {self.cores:g} "
            f"core{'' if self.cores == 1 else 's'}. Make {self._slowest()} cheaper."
        )

    def _slowest(self) -> str:
        return max(self.parts, key=lambda part: self.parts[part], default="fetch")


def _s(seconds: float) -> str:
    return f"{seconds:.2g} s"


def probe(
    loader: DataLoader[Any],
    batches: Batches,
    start: int,
    *,
    cores: float,
    counts: Sequence[int] | None,
    seconds: float,
) -> Probe:
    """Return what `counts` workers make of the batches from position `start` on.

    Raises:
        UsageError: Counts that are none, no time, or a stream.
        DataError: A sample cannot be loaded.
    """
    if seconds <= 0 or (counts is not None and (not counts or min(counts) < 0)):
        raise UsageError(
            "probe takes numbers of workers and seconds, such as probe([0, 2, 4], seconds=10)."
        )
    if batches.about()["samples"] is None:
        raise UsageError(
            "loader.probe() cannot try workers on a stream.",
            why="it would read ahead in it, and those samples would come to no loop",
            do="compare num_workers=0 and 2 over some steps: of a stream workers transform and "
            "collate, and none reads",
        )
    parts = _some_of(batches, start)
    begin = perf_counter()
    one = _run(loader, parts, 1, seconds / 4)
    limit = cores if one.cpu_s > WAITS * one.made_s else 4 * cores
    asked = _counts(loader.num_workers, limit) if counts is None else sorted(set(counts))
    rows: list[Tried] = []
    for workers in asked:
        left_s = seconds - (perf_counter() - begin)
        if left_s <= 0 and workers > 1:
            break
        if workers == 0:
            rows.append(Tried(0, one.made_s))
        elif workers == 1:
            rows.append(Tried(1, one.batch_s))
        else:
            tried = _run(loader, parts, workers, left_s / 2)
            rows.append(Tried(workers, tried.batch_s))
    rest_s = services.here.rest_s()
    return Probe(tuple(rows), one.parts, one.cpu_s, cores, loader.num_workers, rest_s)


def _counts(now: int, limit: float) -> list[int]:
    """Return the numbers of workers to try: 0, 1, 2, 4, ... up to `limit`, and the one of now."""
    powers = [1 << i for i in range(MOST_WORKERS.bit_length())]
    most = min(MOST_WORKERS, max(1, int(limit)))
    return sorted({0, *(n for n in powers if n <= most), most, now})


def _some_of(batches: Batches, start: int) -> list[Any]:
    """Return this rank's parts of the next batches, or where none is left, of the epoch's first."""
    ahead = copy.copy(batches)
    ahead.start = start if batches.ends(start) else 0
    return list(itertools.islice(ahead, 4 * MOST_WORKERS))


class _RepeatedBatches:
    """A batch sampler that gives the same parts for ever."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self._parts)


@dataclass(slots=True)
class _Run:
    """Seconds of one batch: from one to the next, of work, by part, and on a processor."""

    batch_s: float
    made_s: float
    parts: dict[str, float]
    cpu_s: float


def _run(loader: DataLoader[Any], parts: Sequence[Any], workers: int, seconds: float) -> _Run:
    """Let workers make batches: at least two each, at most what takes `seconds`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of more workers than cores: whether they help is asked
        iterator = _started(loader, parts, workers)
    reports: list[torch_loaders.BatchReport] = []
    try:
        for _ in range(workers):  # each worker's first, which opens files and imports
            torch_loaders.next_unwatched(iterator)
        began = perf_counter()
        while len(reports) < 2 * workers or (
            len(reports) < 16 * workers and perf_counter() - began < seconds
        ):
            torch_loaders.next_unwatched(iterator)
            one = torch_loaders.report_of(iterator)
            assert one is not None  # `Collate` tells of each
            reports.append(one)
        took_s = perf_counter() - began
    finally:
        torch_loaders.end_workers(iterator)
    mean = {
        part: sum(one.parts_ns.get(part, 0) for one in reports) / len(reports) / 1e9
        for part in PARTS
    }
    made = {part: s for part, s in mean.items() if s > 0 and part != "copy"}
    cpu_s = sum(one.cpu_ns for one in reports) / len(reports) / 1e9
    return _Run(took_s / len(reports), sum(made.values()), made, cpu_s)


def _started(loader: DataLoader[Any], parts: Sequence[Any], workers: int) -> Any:
    """Return an iterator whose workers make these parts for ever."""
    asked: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_sampler=_RepeatedBatches(parts),
        num_workers=workers,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        pin_memory=loader.pin_memory,
        prefetch_factor=loader.prefetch_factor,
        timeout=loader.timeout,
        generator=torch.Generator().manual_seed(0),
    )
    items, init = Items(loader.dataset, skips=True), Init(loader.dataset, loader.worker_init_fn)
    collate, add = Collate(loader.collate_fn), making.here.add_noted
    return torch_loaders.iterator_of(asked, items, collate, init, add)
