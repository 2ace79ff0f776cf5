"""One cell's records in, what follows from them out: who waited for whom, and where time went.

Threads: `receive` runs on ipyparallel's IO thread and appends to a deque; `nbdist-analysis` does
the work, from the first record of a step until `finish`; `now` may be called on any thread,
`subscribe` and `finish` on the main one.

Bounds: the thread takes at most `SHARE` of a core, and rests longer where it waits for one; what
then comes faster than it works is left out, and counted (`Analysis.left_out`).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from nbdist.client.metrics import usage
from nbdist.client.metrics.analysis.clocks import Clocks
from nbdist.client.metrics.analysis.values import Analysis, ExplainedStep, TimeLine
from nbdist.client.metrics.telemetry import CellInfo
from nbdist.shared.background import CoreWaits, lower_thread, pause_s
from nbdist.shared.packed import CALL
from nbdist.shared.wire import Record, is_measured

if TYPE_CHECKING:
    from nbdist.client.metrics.analysis.analyst import Analyst

PERIOD_S = 0.5  # between two looks; records come as often
SHARE = 0.05  # of a core
MOST_WAITING = 20_000  # records that have not been looked at
_KINDS = frozenset({"step", "calls", "links"})

_log = logging.getLogger("nbdist.analysis")


class CellAnalysis:
    """What is known of one cell."""

    def __init__(self, info: CellInfo, clocks: Clocks) -> None:
        """Begin without a thread; a cell that takes no step never gets one."""
        self._info = info
        self._clocks = clocks
        # A deque, not queue.Queue: append is atomic, and the IO thread must never wait for a lock.
        self._waiting: deque[list[Record]] = deque()
        self._received = 0
        self._taken = 0
        self._lost = 0
        self._analysis = Analysis()
        self._subscribers: list[Callable[[list[ExplainedStep]], None]] = []
        self._analyst: Analyst | None = None
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._has_failed = False

    def receive(self, records: list[Record]) -> None:
        """Take records; called on the IO thread, returns at once."""
        if self._has_failed or self._ending.is_set():
            return
        of_steps = [
            record
            for record in records
            if record.kind in _KINDS and (record.kind != "step" or is_measured(record.values))
        ]
        if not of_steps:
            return
        if self._received - self._taken > MOST_WAITING:
            self._lost += sum(
                len(r.detail.calls) // len(CALL) for r in of_steps if r.detail is not None
            )
            return
        self._received += len(of_steps)
        self._waiting.append(of_steps)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nbdist-analysis", daemon=True)
            self._thread.start()

    def now(self) -> Analysis:
        """Return what is known by now; costs nothing."""
        return self._analysis

    def line_of(self, step: int) -> TimeLine | None:
        """Return the time line of one step; None where it is not kept. Any thread."""
        return None if self._analyst is None else self._analyst.line_of(step)

    def subscribe(self, callback: Callable[[list[ExplainedStep]], None]) -> None:
        """Call `callback` with steps as they are explained, each once, in order.

        It runs on `nbdist-analysis`. If it raises, that is logged and it is never called again.
        """
        self._subscribers.append(callback)

    def finish(self, timeout_s: float) -> None:
        """Work off what has come, and end the thread; afterwards `now` has the last word."""
        self._ending.set()
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._has_failed = True
            _log.error("The last steps were not analysed within %g s", timeout_s)

    @usage.counts
    def _run(self) -> None:
        """Explain until the cell ends: the body of the thread."""
        try:
            # numpy takes a tenth of a second to import, and most cells need none of this.
            from nbdist.client.metrics.analysis.analyst import Analyst

            lower_thread()
            waits = CoreWaits()
            analyst = self._analyst = Analyst(self._info.ranks, self._clocks)
            is_last, rest_s = False, PERIOD_S
            while not is_last:
                is_last = self._ending.wait(rest_s)
                self._clocks.refresh(self._info.ranks)
                began = time.thread_time()
                explained = analyst.take(self._drain(), is_last=is_last)
                analysis = analyst.analysis()
                self._analysis = replace(analysis, left_out=analysis.left_out + self._lost)
                if explained:
                    self._tell(explained)
                rest_s = pause_s(PERIOD_S, time.thread_time() - began, SHARE, waits.share())
        except Exception:
            # Training and the cell go on; `now` keeps the last result.
            self._has_failed = True
            self._waiting.clear()
            _log.exception("The analysis of steps stopped for this cell")

    def _drain(self) -> list[Record]:
        records: list[Record] = []
        while self._waiting:
            records += self._waiting.popleft()
        self._taken += len(records)
        return records

    def _tell(self, explained: list[ExplainedStep]) -> None:
        for callback in list(self._subscribers):
            try:
                callback(explained)
            except Exception:
                self._subscribers.remove(callback)
                _log.exception("A subscriber of analysed steps failed and was removed")
