"""Record torch.profiler on this rank for chosen steps of a cell, into a file.

A cell is recorded from its beginning, for it is not known yet whether it trains. Its first step
drops that, unless it was chosen itself; the recording proper runs from the end of the step before
the first chosen one to the end of the last. A cell without a step keeps the recording of its
beginning.

Each step is marked "ProfilerStep#N", as torch's own schedule does, with N as the board counts.
Times in the file are the wall clock's; its `nbdist` entry has the offset of `perf_counter_ns`
from it, by which the notebook brings all ranks to one clock.

Threads: the main one does everything. A timer ends a recording that lasts too long: it asks the
interpreter to make a call on the main thread, where torch wants a recording to end.
"""

import contextlib
import ctypes
import gzip
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, record_function

from nbdist.engine.compat import torch_hooks
from nbdist.engine.component import Component, EndedCell
from nbdist.engine.training import training
from nbdist.shared.error_text import named
from nbdist.shared.wire import CellStart

# An event takes 2 KB while it is recorded, and 6 more when that ends (torch 2.13).
WHOLE_S = 1.0  # longest recording of a cell without a step: 100 000 small operators
STEPS_S = 60.0  # longest recording of steps
MOST_GROWTH_BYTES = 256 * 2**20  # of this process since the recording began, at the end of a step
CHUNK_BYTES = 4 * 2**20
_OUR_FOLDERS = 5  # .nbdist/profiles/<start>/cell-N/ranks
_ZIP_LEVEL = 3  # twice as fast as the default, a tenth larger

_log = logging.getLogger("nbdist.profile")

End = Literal["steps", "cell", "limit", "memory", "own"]


class Profile:
    """One cell's recording on one rank. Main thread only."""

    def __init__(self, file: Path, rank: int, first: int, last: int, *, cuda: bool) -> None:
        """Prepare; nothing is recorded yet.

        Args:
            file: Where the trace goes, `.json.gz`.
            rank: This rank.
            first: First step to record, from 1.
            last: Last one.
            cuda: Whether to record a GPU.
        """
        self.why = ""  # there is no file
        self.file = file
        self._rank, self._first, self._last = rank, first, last
        self._activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
        self._torch: torch.profiler.profile | None = None  # while it records
        self._mark: record_function | None = None
        self._steps: list[int] = []
        self._is_starting = False
        self._undo: torch_hooks.Undo | None = None
        self._began_ns = 0
        self._began_bytes = 0
        self._deadline = 0.0
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        """The cell begins."""
        with self._safely():
            self._undo = torch_hooks.wrap_prepare_profiler(self._before_another)
            self._start(1 if self._first == 1 else None)

    def step_ended(self, step: int) -> None:
        """A step has ended, the next one begins."""
        is_due = step + 1 == self._first
        if not is_due and step > 1 and self._torch is None:
            return
        with self._safely():
            if step < self._first:
                self._drop()
            elif self._torch is not None:
                self._steps.append(step)
                if step == self._last:
                    self._save("steps")
                elif _resident_bytes() - self._began_bytes > MOST_GROWTH_BYTES:
                    self._save("memory")
                else:
                    self._mark_step(step + 1)
            if is_due:
                self._start(step + 1)

    def end(self) -> None:
        """The cell has ended, failed or not."""
        with self._safely():
            if self._undo is not None:
                self._undo()
            if self._torch is not None:
                self._save("cell")

    def end_if_late(self) -> None:
        """Keep the recording, if it has lasted too long."""
        with self._safely():
            if self._torch is not None and time.monotonic() >= self._deadline:
                self._save("limit")

    def _before_another(self, native: Callable[..., Any]) -> Callable[..., Any]:
        """Give way to the cell's own profiler: of two, torch gives the first one nothing."""

        @wraps(native)
        def prepare_trace(profiler: Any) -> Any:
            if not self._is_starting:
                with self._safely():
                    self._give_way()
            return native(profiler)

        return prepare_trace

    def _give_way(self) -> None:
        if self._torch is not None and self._steps:
            self._save("own")
        elif self._torch is not None:
            self._drop()
        self._give_up("the cell has a profiler of its own")

    def _give_up(self, why: str) -> None:
        self.why = why
        self._first = self._last = 0

    def _start(self, step: int | None) -> None:
        if torch_hooks.is_profiled():
            self._give_up("the cell has a profiler of its own")
            return
        # Kineto prints each beginning and end to descriptor 2, except above this level.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        profiler = torch.profiler.profile(activities=self._activities)
        self._is_starting = True
        try:
            profiler.start()
        finally:
            self._is_starting = False
        self._torch = profiler
        self._began_ns, self._began_bytes = time.perf_counter_ns(), _resident_bytes()
        longest_s = WHOLE_S if step is None else STEPS_S
        self._deadline = time.monotonic() + longest_s
        self._timer = threading.Timer(longest_s, _ask_main_thread)
        self._timer.name, self._timer.daemon = "nbdist-profile", True
        self._timer.start()
        if step is not None:
            self._mark_step(step)

    def _mark_step(self, step: int | None) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
        self._mark = None if step is None else record_function(f"ProfilerStep#{step}")
        if self._mark is not None:
            self._mark.__enter__()

    def _stop(self) -> torch.profiler.profile:
        profiler, self._torch = self._torch, None
        assert profiler is not None
        assert self._timer is not None
        self._timer.cancel()
        try:
            self._mark_step(None)
        finally:
            profiler.stop()
        return profiler

    def _drop(self) -> None:
        """Drop what was recorded before the first step."""
        if self._torch is not None:
            self._stop()
        self.file.unlink(missing_ok=True)

    def _save(self, end: End) -> None:
        assert self._torch is not None
        self._torch.add_metadata_json("nbdist", json.dumps(self._facts(end)))
        if not torch.distributed.is_initialized():
            alone = {"backend": "none", "rank": self._rank, "world_size": 1}
            self._torch.add_metadata_json("distributedInfo", json.dumps(alone))
        profiler = self._stop()
        for folder in reversed(self.file.parents[:_OUR_FOLDERS]):
            folder.mkdir(mode=0o700, exist_ok=True)
        plain = self.file.with_suffix("")
        draft = self.file.with_suffix(".draft")
        profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as read, gzip.open(draft, "wb", _ZIP_LEVEL) as write:
            shutil.copyfileobj(read, write, CHUNK_BYTES)
        plain.unlink()
        draft.rename(self.file)  # whole or not at all

    def _facts(self, end: End) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "pid": os.getpid(),
            "steps": self._steps,
            "end": end,
            "began_ns": self._began_ns,
            "ended_ns": time.perf_counter_ns(),
            "wall_minus_perf_ns": _wall_minus_perf_ns(),
        }

    @contextlib.contextmanager
    def _safely(self) -> Iterator[None]:
        """Defer interrupts, and keep failures from the training."""
        came: list[int] = []
        before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
        try:
            yield
        except Exception as error:
            _log.exception("Profiling of the cell has ended with an error")
            self._give_up(named(error).splitlines()[0])
            if self._torch is not None:
                with contextlib.suppress(Exception):
                    self._stop()
        finally:
            signal.signal(signal.SIGINT, before)
            if came:
                signal.raise_signal(signal.SIGINT)


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _wall_minus_perf_ns() -> int:
    """Return how far the wall clock is ahead of `perf_counter_ns`; the best of a few readings."""
    looks = []
    for _ in range(5):
        before, wall, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        looks.append((after - before, wall - (before + after) // 2))
    return min(looks)[1]


# -- the call on the main thread

_Call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_add_pending_call = ctypes.pythonapi.Py_AddPendingCall
_add_pending_call.argtypes = [_Call, ctypes.c_void_p]


def _end_if_late(_: int | None) -> int:
    if here.current is not None:
        here.current.end_if_late()
    return 0


_end_late = _Call(_end_if_late)  # kept: C holds no reference


def _ask_main_thread() -> None:
    _add_pending_call(_end_late, None)


class Profiler(Component):
    """The profile of the cell that runs, or of the last one."""

    def __init__(self) -> None:
        self.current: Profile | None = None

    def cell_began(self, start: CellStart) -> None:
        """Record the requested steps, if any."""
        self.current, asked = None, start.profile
        if asked is None:
            return
        rank = dist.get_rank()
        file = Path(asked.folder) / f"rank-{rank}.json.gz"
        cuda = torch.cuda.is_initialized()
        self.current = Profile(file, rank, asked.first, asked.last, cuda=cuda)
        training.here.at_step_end("profile", self.current.step_ended)
        self.current.begin()

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Keep what was recorded."""
        if self.current is not None:
            training.here.at_step_end("profile", None)
            self.current.end()
        return ()

    def read(self, buffers: list[memoryview], offset: int) -> tuple[dict[str, Any], list[Any]]:
        """Return a piece of the last cell's trace and its `size`; 0 where there is none, and `why`.

        Main thread, as a request of the notebook.
        """
        if self.current is None or not self.current.file.exists():
            return {"size": 0, "why": "" if self.current is None else self.current.why}, []
        with self.current.file.open("rb") as file:
            file.seek(offset)
            piece = file.read(CHUNK_BYTES)
            return {"size": os.fstat(file.fileno()).st_size, "why": self.current.why}, [piece]


here = Profiler()
