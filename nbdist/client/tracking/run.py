"""Track each training cell as one MLflow run, without ever being in its way.

The tracker follows every cell and stays silent until the first record arrives. Then one thread
writes the run into the spool (`writing`), and a process of its own sends it on (`ship`). Nothing
that can be slow or dead (disk, server, git) is ever waited for by the cell, but for the last flush
to the disk at its end.

Threads: `receive` runs on ipyparallel's IO thread and `explained` on insight's; both append to a
deque. `_run` is the run's own thread; `follow`, `finish` and `close` are called on the main one.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbdist.client.metrics import usage
from nbdist.client.metrics.analysis.cell_analysis import CellAnalysis
from nbdist.client.metrics.analysis.values import ExplainedStep
from nbdist.client.metrics.telemetry import CellInfo
from nbdist.client.tracking import provenance
from nbdist.client.tracking.begin import RunPlace
from nbdist.client.tracking.settings import shown_uri, split_password, tracking_uri, whole_uri
from nbdist.client.tracking.shipping.shipper import ShippingProcess, wait_until_sent
from nbdist.client.tracking.spool import SpooledRun, SpoolState, spool_of
from nbdist.client.tracking.study import Study
from nbdist.client.tracking.writing import Feed, Outcome, RunEnd, RunWriter
from nbdist.shared.background import lower_thread
from nbdist.shared.errors import TrackingError
from nbdist.shared.wire import RUN_KINDS, Record
from nbdist.study.beside import Beside

MOST_WAITING = 200_000  # records not yet on disk, about 100 MB; a disk that hangs fills it
PERIOD_S = 0.5  # between writes to the spool
FINISH_TIMEOUT_S = 5.0

_log = logging.getLogger("nbdist.tracking")


@dataclass(frozen=True, slots=True)
class RunLink:
    """What a cell says of its run. `text` holds no number that changes from time to time."""

    name: str
    text: str
    folder: Path

    @property
    def run_id(self) -> str:
        """Return MLflow's id of the run; empty as long as MLflow has not been reached."""
        return SpooledRun(self.folder).state().run_id


class Tracker:
    """Tracks the cells of one session. Creating it starts, imports and writes nothing.

    Args:
        folder: The private folder beside the notebook (`.nbdist`); made when a run begins.
        uri: MLflow's tracking URI; None for MLFLOW_TRACKING_URI, else a database in `folder`. A
            password in it reaches the processes that talk to MLflow and nothing else.
        experiment: MLflow's experiment; None for the notebook's name.
    """

    def __init__(self, folder: Path, uri: str | None = None, experiment: str | None = None) -> None:
        self.folder = folder.absolute()
        self.uri, self.credentials = split_password(tracking_uri(self.folder, uri, os.environ))
        self.experiment = experiment or provenance.notebook_name()
        self.shipping = ShippingProcess(self.folder, self.credentials)
        self._current: TrackedRun | None = None
        self._study: Study | None = None

    @property
    def whole_uri(self) -> str:
        """The tracking URI with the password it may hold; for a process's environment alone."""
        return whole_uri(self.uri, self.credentials)

    @property
    def place(self) -> RunPlace:
        """Where the runs go."""
        return RunPlace(self.folder, self.uri, self.experiment)

    def follow(
        self,
        info: CellInfo,
        telemetry: Feed,
        insight: CellAnalysis | None = None,
        cells: Sequence[CellInfo] = (),
    ) -> "TrackedRun":
        """Return the run of a cell; it begins with the cell's first record, or never.

        A run that was never finished, for its cell broke in an unforeseen place, ends here.

        Args:
            info: The cell.
            telemetry: Its records.
            insight: What is found out about them, where anything is.
            cells: The session's cells before this one, to make the run again from.
        """
        self._end_current()
        study = self._study if self._study is not None and info.study == self._study.key else None
        run = self._current = TrackedRun(self, info, telemetry, insight, (*cells, info), study)
        if info.track:
            telemetry.subscribe(run.receive)
            if insight is not None:
                insight.subscribe(run.explained)
        return run

    def begin_study(self, name: str, source: str, values: Mapping[str, Sequence[object]]) -> Study:
        """Return a run under which those of the coming cells are nested that name its key.

        It begins with the first of them, or never.

        Args:
            name: Its name.
            source: The cell.
            values: What is tried, by the names of the params.
        """
        self._study = Study(self.place, name, source, values)
        return self._study

    def flush(self, timeout_s: float) -> bool:
        """Wait until MLflow has all runs that ended; return whether it has."""
        return wait_until_sent(self.folder, timeout_s)

    def close(self, timeout_s: float) -> None:
        """End the shipping process; what it cannot send within `timeout_s` stays in the spool."""
        self._end_current()
        if self._study is not None:
            self._study.finish("interrupted")
        self.shipping.close(timeout_s)

    def _end_current(self) -> None:
        if self._current is not None and not self._current.is_finished:
            self._current.finish("interrupted")


class TrackedRun:
    """One cell's run. Made by `Tracker.follow`."""

    def __init__(
        self,
        tracker: Tracker,
        info: CellInfo,
        telemetry: Feed,
        insight: CellAnalysis | None,
        cells: Sequence[CellInfo],
        study: Study | None,
    ) -> None:
        self._tracker = tracker
        self._info = info
        self._telemetry = telemetry
        self._insight = insight
        self._cells = cells
        self._study = study
        # Deques, not queue.Queue: append is atomic, and the IO thread must never wait for a
        # lock that a thread on a slow disk holds.
        self._waiting: deque[list[Record]] = deque()
        self._explained: deque[list[ExplainedStep]] = deque(maxlen=MOST_WAITING)
        self._received = 0
        self._written = 0
        self._lost = 0
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._end: RunEnd | None = None
        self._failure: str | None = None
        self._writer: RunWriter | None = None

    @property
    def is_finished(self) -> bool:
        """Return whether the run takes no more records."""
        return self._ending.is_set()

    @property
    def key(self) -> str | None:
        """The run's key in the spool; None before it has begun."""
        return self._writer.begin.key if self._writer is not None else None

    def receive(self, records: list[Record]) -> None:
        """Take steps, logged values and devices; called on the IO thread, returns at once."""
        has_begun = self._thread is not None  # devices alone make no run
        records = [r for r in records if r.kind in RUN_KINDS or (has_begun and r.kind == "device")]
        if not records or self._failure is not None or self._ending.is_set():
            return
        if self._received - self._written > MOST_WAITING:
            self._lost += len(records)
            return
        self._received += len(records)
        self._waiting.append(records)
        if self._thread is None:
            self._thread = self._started()

    def _started(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="nbdist-tracking", daemon=True)
        thread.start()
        return thread

    def _is_of_a_sweep(self) -> bool:
        """Whether the run stands beside others of a sweep: one that failed at once counts too."""
        return self._info.track and self._study is not None and self._study.has_begun

    def explained(self, steps: list[ExplainedStep]) -> None:
        """Take steps that were explained; called on insight's thread, returns at once."""
        if self._failure is None and not self._ending.is_set():
            self._explained.append(steps)

    def finish(
        self,
        outcome: Outcome,
        error: str | None = None,
        picture: bytes | None = None,
        files: Mapping[str, Path] | None = None,
        board: bytes | None = None,
        beside: Beside | None = None,
    ) -> RunLink | None:
        """End the run; return what the cell says of it, None when no record came.

        Waits until the run is on disk, milliseconds as a rule and 5 s at most; never for MLflow.

        Args:
            outcome: How the cell ended.
            error: The text of its error, for people.
            picture: The board's last picture, PNG.
            files: More artifacts: where they lie, by their names in the run.
            board: What its board is drawn from again.
            beside: Its estimate, and what was measured.
        """
        ended_early = outcome != "finished" and self._is_of_a_sweep()
        if self._thread is None and not ended_early:
            return None
        verdicts = self._insight.now().verdicts if self._insight is not None else ()
        now_ms = time.time_ns() // 1_000_000
        self._end = RunEnd(outcome, error, picture, now_ms, verdicts, files or {}, board, beside)
        if self._thread is None:
            self._thread = self._started()
        self._ending.set()
        self._thread.join(FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            self._failure = f"the disk did not answer within {FINISH_TIMEOUT_S:g} s"
        begin = self._writer.begin if self._writer else None
        name = begin.name if begin else self._info.run_name or "of this cell"
        folder = spool_of(self._tracker.folder) / (begin.key if begin else "unwritten")
        return RunLink(name, self._text(name, folder), folder)

    def _text(self, name: str, folder: Path) -> str:
        place = f"{self._tracker.folder.name}/spool"
        if self._failure is not None:
            return f"Run {name} is not tracked: {self._failure}. Training was not affected."
        lines = [f'Saved as MLflow run "{name}". List runs: %dist runs. Open the UI: %dist ui.']
        if self._writer is not None and self._writer.models:
            models = ", ".join(self._writer.models.values())
            lines.append(f"Published with it, once it is in MLflow: {models}.")
        if self._lost:
            lines.append(f"{self._lost} records were lost, because the disk was too slow.")
        state = SpooledRun(folder).state()
        if self._tracker.shipping.has_failed:
            lines.append(
                f"It is kept in {place}: the process that sends runs has crashed (see "
                f"{self._tracker.folder.name}/logs/tracking.log); %dist runs --sync sends it."
            )
        elif why := state.trouble:
            lines.append(
                f"MLflow at {shown_uri(self._tracker.uri)} does not accept it now ({why}); it is "
                f"kept in {place} and sent later: %dist runs --sync tries at once."
            )
        begin = self._writer.begin if self._writer else None
        # MLflow's may be newer than the one that this folder knew.
        if begin and begin.resume and (begin.continues is None or state.resumed == "there"):
            lines.append(resume_text(name, state))
        return "\n".join(lines)

    @usage.counts
    def _run(self) -> None:
        """Write the run; the body of its thread."""
        lower_thread()
        try:
            self._write()
        except TrackingError as error:
            self._failure = f"{error.what} {error.why}".strip().rstrip(".")
        except Exception as error:
            # Whatever happens to tracking, training goes on; the cell's last line says it.
            self._failure = f"{type(error).__name__}: {error}"
        if self._failure is not None:
            self._waiting.clear()
            _log.warning("tracking stopped: %s", self._failure)

    def _write(self) -> None:
        place, info = self._tracker.place, self._info
        first = self._waiting[0][0].time_ns if self._waiting else time.time_ns()
        time_ms = first // 1_000_000
        if self._study is not None:
            self._study.begin(info, time_ms)  # before its first run: runs are sent in this order
        insight = self._insight
        writer = self._writer = RunWriter(
            place,
            info,
            self._cells,
            self._telemetry,
            time_ms,
            (lambda: insight.now().ranks) if insight is not None else tuple,
        )
        try:
            self._ship()
            writer.write_story()
            while not self._ending.wait(PERIOD_S):
                self._write_waiting(writer)
                writer.tick()
                self._ship()
            self._write_waiting(writer)
            assert self._end is not None, "finish sets the end before it wakes us"
            writer.end(self._end)
        finally:
            writer.close()
        self._ship()

    def _ship(self) -> None:
        """See that the run is being sent; a process that does not start must not stop the run."""
        try:
            self._tracker.shipping.ensure()
        except OSError as error:
            _log.warning("runs are kept but not sent: %s", error)

    def _write_waiting(self, writer: RunWriter) -> None:
        while self._waiting:
            records = self._waiting.popleft()
            writer.add(records)
            self._written += len(records)
        while self._explained:
            writer.add_explained(self._explained.popleft())


def resume_text(name: str, state: SpoolState) -> str:
    """Return what is known of a run to go on with that this folder did not have."""
    if state.resumed == "there":
        return f"It continues run {name}, which was found in MLflow."
    if state.resumed == "none":
        return (
            f"There was no run {name} to continue, neither here nor in MLflow, so it is a new run."
        )
    return f"No run {name} is known here. If MLflow has one, it is continued when this run is sent."
