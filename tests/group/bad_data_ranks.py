"""What the ranks run in test_bad_data: datasets some of whose samples raise, hang or kill."""

import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, dataloader, get_worker_info

from nbdist.engine.compat.torch_loaders import BatchReport, Made
from nbdist.engine.component import EndedCell
from nbdist.engine.data import services
from nbdist.engine.data.coverage import coverage
from nbdist.engine.data.make import loader
from nbdist.engine.data.position import position
from nbdist.engine.training import training
from nbdist.shared.errors import DataError
from tests.group.loader_ranks import allow_workers

ENDED = EndedCell(1, "", has_succeeded=True)


class Faulty(Dataset[int]):
    """Samples 0 ... n - 1, of which those in `bad` do what `how` says."""

    def __init__(self, n: int, bad: list[int], how: str = "raise", once: str = "") -> None:
        self.n, self.bad, self.how, self.once = n, set(bad), how, once

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        if i in self.bad and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            self._fail(i)
        return i

    def _fail(self, i: int) -> None:
        if self.how == "kill with a lock":
            # Of the event by which torch ends its workers, and which each of them asks.
            frame = sys._getframe()
            while "done_event" not in frame.f_locals:
                assert frame.f_back is not None
                frame = frame.f_back
            frame.f_locals["done_event"]._cond.acquire()
        if self.how.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "hang":
            time.sleep(1000)
        raise ValueError(f"bad pixel in {i}")


class Together(Faulty):
    """The same, asked for many at once, and known by file."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[i] for i in indices]

    def origin_of(self, i: int) -> str:
        return f"part-{i // 10}.parquet, row group {i % 10 // 5}"


def raises(workers: int, kind: str) -> dict[str, Any]:
    """Meet a bad sample, mend the dataset, and go on."""
    allow_workers()
    data = {"one": Faulty, "many": Together}[kind](24, [13])
    train = loader(data, global_batch=8, shuffle=False, num_workers=workers)
    seen, told, cause, state = [], "", "", {"consumed": -1}
    loop = iter(train)
    for _ in range(2):
        try:
            for batch in loop:
                seen.append(batch.tolist())
        except DataError as error:
            told, cause = str(error), str(error.__cause__)
            state = train.state_dict()
            data.bad.clear()
    return {"seen": seen, "told": told, "cause": cause, "consumed": state["consumed"]}


def skips(workers: int, bad: list[int], global_batch: int = 8) -> dict[str, Any]:
    allow_workers()
    data = Faulty(24, bad)
    options: dict[str, Any] = {"num_workers": workers, "on_bad": "skip", "shuffle": False}
    train = loader(data, global_batch=global_batch, **options)
    seen, ends = [], []
    for batch in train:
        seen.append(batch.tolist())
        ends.append(train.consumed)
    return {
        "seen": seen,
        "ends": ends,
        "skipped": [(one.epoch, one.sample, one.why) for one in train.skipped],
        "covered": [(e.once, e.skipped, e.missing, e.repeated) for e in coverage().epochs],
        "notices": [*position.here.cell_ended(ENDED), *position.here.cell_ended(ENDED)],
    }


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("nbdist.data").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def allow_workers_that_end() -> None:
    """Allow workers, and have torch look after them, and wait for their end, for less than 5 s."""
    allow_workers()
    dataloader._utils.MP_STATUS_CHECK_INTERVAL = 0.2
    dataloader._MultiProcessingDataLoaderIter._try_get_data.__defaults__ = (0.2,)


def loses_workers(persistent: bool) -> dict[str, Any]:
    """Kill one worker while the loop does something else, and then all while it waits."""
    allow_workers_that_end()
    log = Lines()
    train = loader(Faulty(40, []), global_batch=4, num_workers=2, persistent_workers=persistent)
    epochs = []
    for _ in range(2):
        seen = []
        for batch in train:
            seen.append(batch.tolist())
            if len(seen) == 3:
                victim = torch.multiprocessing.active_children()[0]
                assert victim.pid is not None
                os.kill(victim.pid, signal.SIGKILL)
                victim.join()  # and nothing is raised here
        epochs.append(seen)
    alone = loader(Faulty(40, []), global_batch=4)
    return {"epochs": epochs, "expected": [[b.tolist() for b in alone] for _ in range(2)]} | {
        "lines": log.lines,
        "left": len(torch.multiprocessing.active_children()) - 2 * persistent,
    }


def dies_at(how: str, once: str) -> dict[str, Any]:
    """Reach a sample that kills or hangs its worker, each time or once."""
    allow_workers_that_end()
    log = Lines()
    data = Faulty(24, [13], how, once)
    options: dict[str, Any] = {"num_workers": 2, "timeout": 1 if how == "hang" else 0}
    train = loader(data, global_batch=8, shuffle=False, **options)
    seen, told = [], ""
    try:
        for batch in train:
            seen.append(batch.tolist())
    except DataError as error:
        told = str(error)
    return {"seen": seen, "told": told, "lines": log.lines, "consumed": train.consumed}


class Plain(Dataset[Any]):
    """Tells what it is asked for, and what torch says of it in a worker."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> tuple[int, str]:
        info = get_worker_info()
        return i, "" if info is None else type(info.dataset).__name__


def init(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    vars(info.dataset)["set_by_init"] = worker


def collate(samples: Any) -> tuple[str, list[int], set[str]]:
    numbers, names = zip(*samples, strict=True)
    return type(samples).__name__, list(numbers), set(names)


def seen_by_users(workers: int) -> dict[str, Any]:
    allow_workers()
    data = Plain()
    train = loader(
        data,
        global_batch=4,
        num_workers=workers,
        collate_fn=collate,
        worker_init_fn=init if workers else None,
        shuffle=False,
    )
    return {
        "batches": list(train),
        "same": train.dataset is data and train.collate_fn is collate,
        "wrapped": type(train).__mro__[1].__name__,
    }


class Slow(Dataset[int]):
    """Waits in each item; counts what is asked of it in this process."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s, self.asked = wait_s, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> int:
        self.asked += 1
        time.sleep(self.wait_s)
        torch.rand(())
        return i


def probes() -> dict[str, Any]:
    """Probe in the midst of an epoch."""
    allow_workers()
    data = Slow(0.005)
    train = loader(data, global_batch=4, seed=3)
    alone = [b.tolist() for b in loader(Slow(0), global_batch=4, seed=3)]
    loop = iter(train)
    seen = [next(loop).tolist()]
    before = torch.get_rng_state(), train.state_dict(), data.asked
    children = len(torch.multiprocessing.active_children())
    found = train.probe([0, 1, 4], seconds=100)
    after = torch.get_rng_state(), train.state_dict(), data.asked
    seen += [b.tolist() for b in loop]
    return {
        "rows": [(row.workers, row.batch_s) for row in found.rows],
        "parts": found.parts,
        "table": repr(found),
        "sentence": found.sentence(),
        "unmoved": bool((before[0] == after[0]).all()) and before[1:] == after[1:],
        "same": seen == alone,
        "children": len(torch.multiprocessing.active_children()) - children,
    }


class Kept:
    """Stands where a rank's recorder does."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, dict[str, float]]] = []

    def add(self, kind: str, step: int, values: dict[str, float], detail: Any = None) -> None:
        self.rows.append((kind, values))

    def fact(self, **texts: str) -> None:
        raise AssertionError(texts)


def records(workers: int) -> list[tuple[str, dict[str, float]]]:
    """Train on a loader whose items wait, with the rank's hooks, and return the records."""
    allow_workers()
    kept: Any = Kept()
    training.here.install(kept)
    services.here.tell_loop = lambda facts: kept.add("loader", 0, facts)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training.here.begin_cell()
    for batch in loader(Slow(0.005), global_batch=16, num_workers=workers):
        optimizer.zero_grad()
        model(batch[:, None].float()).mean().backward()
        optimizer.step()
    training.here.end_cell()
    training.here.set_enabled(False)
    return kept.rows


class Pinnable:
    def pin_memory(self) -> str:
        return "pinned"


def pins() -> tuple[Any, int]:
    """Pin a batch in what it travels in, as torch's thread does."""
    made = Made(Pinnable(), BatchReport())
    again = made.pin_memory()
    return again.batch, again.report.parts_ns["copy"]
