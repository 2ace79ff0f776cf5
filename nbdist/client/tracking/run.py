"""Track each training cell as one MLflow run, without ever being in its way.

The tracker is told of every cell and stays silent until the first record arrives. Then one thread
writes the run into the spool (`spool`), and a process of its own sends it on (`ship`). Nothing
that can be slow or dead (disk, server, git) is ever waited for by the cell, but for the last flush
to the disk at its end.

Threads: `_receive` runs on ipyparallel's IO thread and appends to a deque; `_write` is the run's
own thread; `follow`, `finish` and `close` are called on the main one.
"""

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from nbdist.client.insight.insight import Insight
from nbdist.client.tracking import provenance
from nbdist.client.tracking.folder import make_private_folder
from nbdist.client.tracking.names import (
    RUN_NAME_LENGTH,
    hide_secrets,
    merge_facts,
    params_of,
    run_name,
)
from nbdist.client.tracking.series import Series
from nbdist.client.tracking.settings import own_artifacts, shown_uri, tracking_uri
from nbdist.client.tracking.shipper import ShippingProcess, wait_until_sent
from nbdist.client.tracking.spool import (
    PREPARING,
    Begin,
    SpooledRun,
    SpoolWriter,
    spool_of,
    spooled_runs,
)
from nbdist.errors import TrackingError
from nbdist.wire import CellInfo, Record

Outcome = Literal["finished", "failed", "interrupted"]

MOST_WAITING = 200_000  # records not yet on disk, about 100 MB; a disk that hangs fills it
PERIOD_S = 0.25  # between writes to the spool
SUMMARY_S = 2.0
FINISH_TIMEOUT_S = 5.0
_STATUS: dict[Outcome, str] = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "interrupted": "KILLED",
}
# matplotlib's petroff8, which people with colour blindness can tell apart (arXiv:2107.02270).
_COLORS = ("#1845fb", "#ff5e02", "#c91f16", "#c849a9", "#adad7d", "#86c8dd", "#578dff", "#656364")
_TAG_FACTS = ("torch", "cuda", "nccl", "host")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")

_log = logging.getLogger("nbdist.tracking")


class Feed(Protocol):
    """What the tracker needs of a cell's telemetry."""

    facts: dict[int, dict[str, str]]

    def subscribe(self, callback: Callable[[list[Record]], None]) -> None:
        """Call `callback` with each new record, once."""


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
        uri: MLflow's tracking URI; None for MLFLOW_TRACKING_URI, else a database in `folder`.
        experiment: MLflow's experiment; None for the notebook's name.
    """

    def __init__(self, folder: Path, uri: str | None = None, experiment: str | None = None) -> None:
        self.folder = folder.absolute()
        self.uri = tracking_uri(self.folder, uri, os.environ)
        self.experiment = experiment or provenance.notebook_name()
        self.shipping = ShippingProcess(self.folder)
        self._current: TrackedRun | None = None

    def follow(
        self, info: CellInfo, telemetry: Feed, insight: Insight | None = None
    ) -> "TrackedRun":
        """Return the run of a cell; it begins with the cell's first record, or never.

        A run that was never finished, for its cell broke in an unforeseen place, ends here.
        """
        self._end_current()
        run = self._current = TrackedRun(self, info, telemetry, insight)
        if info.track:
            telemetry.subscribe(run.receive)
        return run

    def flush(self, timeout_s: float) -> bool:
        """Wait until MLflow has all runs that ended; return whether it has."""
        return wait_until_sent(self.folder, timeout_s)

    def close(self, timeout_s: float) -> None:
        """End the shipping process; what it cannot send within `timeout_s` stays in the spool."""
        self._end_current()
        self.shipping.close(timeout_s)

    def _end_current(self) -> None:
        if self._current is not None and not self._current.is_finished:
            self._current.finish("interrupted")


class TrackedRun:
    """One cell's run. Made by `Tracker.follow`."""

    def __init__(
        self, tracker: Tracker, info: CellInfo, telemetry: Feed, insight: Insight | None = None
    ) -> None:
        self._tracker = tracker
        self._info = info
        self._telemetry = telemetry
        self._insight = insight
        # A deque, not queue.Queue: append is atomic, and the IO thread must never wait for a
        # lock that a thread on a slow disk holds.
        self._waiting: deque[list[Record]] = deque()
        self._received = 0
        self._written = 0
        self._lost = 0
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._end: _End | None = None
        self._failure: str | None = None
        self._begin: Begin | None = None
        self._facts_told: set[str] = set()

    @property
    def is_finished(self) -> bool:
        """Return whether the run takes no more records."""
        return self._ending.is_set()

    def receive(self, records: list[Record]) -> None:
        """Take records; called on the IO thread, returns at once."""
        if self._failure is not None or self._ending.is_set():
            return
        if self._received - self._written > MOST_WAITING:
            self._lost += len(records)
            return
        self._received += len(records)
        self._waiting.append(records)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nbdist-tracking", daemon=True)
            self._thread.start()

    def finish(
        self,
        outcome: Outcome,
        error: str | None = None,
        picture: bytes | None = None,
        files: Mapping[str, Path] | None = None,
    ) -> RunLink | None:
        """End the run; return what the cell says of it, None when no record came.

        Waits until the run is on disk, milliseconds as a rule and 5 s at most; never for MLflow.

        Args:
            outcome: How the cell ended.
            error: The text of its error, for people.
            picture: The board's last picture, PNG.
            files: More artifacts: where they lie, by their names in the run.
        """
        if self._thread is None:
            return None
        self._end = _End(outcome, error, picture, files or {}, time.time_ns() // 1_000_000)
        self._ending.set()
        self._thread.join(FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            self._failure = f"the disk did not answer within {FINISH_TIMEOUT_S:g} s"
        begin = self._begin
        name = begin.name if begin else self._info.run_name or "of this cell"
        key = begin.key if begin else "unwritten"
        folder = spool_of(self._tracker.folder) / key
        return RunLink(name, self._text(name, folder), folder)

    def _text(self, name: str, folder: Path) -> str:
        place = f"{self._tracker.folder.name}/spool"
        if self._failure is not None:
            return f"Run {name} is not tracked: {self._failure}. Training was not affected."
        lines = [f"Run {name} is tracked in MLflow: %dist runs, %dist ui"]
        if self._lost:
            lines.append(f"{self._lost} records came faster than the disk took them and are lost.")
        if self._tracker.shipping.has_failed:
            lines.append(
                f"It waits in {place}, for the process that sends runs has crashed (see "
                f"{self._tracker.folder.name}/logs/tracking.log); %dist runs --sync sends it."
            )
        elif (why := SpooledRun(folder).state().error) and why != PREPARING:
            lines.append(
                f"MLflow at {shown_uri(self._tracker.uri)} does not take it now ({why}); it is "
                f"kept in {place} and sent later: %dist runs --sync tries at once."
            )
        return "\n".join(lines)

    def _run(self) -> None:
        """Write the run; the body of its thread."""
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
        tracker, info = self._tracker, self._info
        make_private_folder(tracker.folder)
        before = self._continued() or (self._resumed() if info.resume else None)
        first_step = int(before.summary().get("last_step", 0)) if before else 0
        series = Series(info.ranks, first_step)
        begin = self._begin = self._make_begin(before)
        writer = SpoolWriter(spool_of(tracker.folder), begin)
        try:
            self._write_summary(writer, series, "running")
            self._ship()
            writer.params(self._params())
            writer.file("cell.py", hide_secrets(info.source).encode())
            writer.tags(provenance.git_tags(tracker.folder.parent))
            writer.file("environment.txt", provenance.environment_text().encode())
            summary_at = time.monotonic()
            while not self._ending.wait(PERIOD_S):
                self._write_waiting(writer, series)
                self._write_facts(writer, settled_only=True)
                writer.flush()
                if time.monotonic() - summary_at > SUMMARY_S:
                    summary_at = time.monotonic()
                    self._write_summary(writer, series, "running")
                self._ship()
            self._write_end(writer, series)
        finally:
            writer.close()
        self._ship()

    def _ship(self) -> None:
        """See that the run is being sent; a process that does not start must not stop the run."""
        try:
            self._tracker.shipping.ensure()
        except OSError as error:
            _log.warning("runs are kept but not sent: %s", error)

    def _write_waiting(self, writer: SpoolWriter, series: Series) -> None:
        while self._waiting:
            records = self._waiting.popleft()
            writer.points(series.add(records, time.monotonic()))
            self._written += len(records)

    def _write_end(self, writer: SpoolWriter, series: Series) -> None:
        end = self._end
        assert end is not None, "finish sets the end before it wakes us"
        self._write_waiting(writer, series)
        writer.points(series.finish())
        self._write_facts(writer, settled_only=False)
        if end.error:
            text = hide_secrets(_ANSI.sub("", end.error))
            writer.file("error.txt", text.encode())
            writer.tags({"nbdist.error": text.strip().splitlines()[0][:250] if text else ""})
        if end.picture:
            writer.file("board.png", end.picture)
        for name, path in end.files.items():
            writer.file(name, path.read_bytes())
        # A clock that was set back must not let a run end before it began.
        assert self._begin is not None
        writer.end(_STATUS[end.outcome], max(end.time_ms, self._begin.time_ms))
        self._write_summary(writer, series, end.outcome)
        writer.flush(to_disk=True)

    def _make_begin(self, before: SpooledRun | None) -> Begin:
        tracker, info = self._tracker, self._info
        time_ms = self._waiting[0][0].time_ns // 1_000_000
        tags = provenance.source_tags(tracker.experiment, info.number, tracker.folder.parent)
        facts = self._facts()
        tags |= {f"nbdist.{key}": facts[key] for key in _TAG_FACTS if key in facts}
        # MLflow draws a run in a colour of its id, and neighbours often come out alike.
        nth = sum(1 for _ in spooled_runs(tracker.folder))
        tags["mlflow.runColor"] = _COLORS[nth % len(_COLORS)]
        name = info.run_name or run_name(facts.get("layout", ""), len(info.ranks), info.params)
        before_begin = before.summary() if before else {}
        return Begin(
            key=f"{time.time_ns():020d}-{os.getpid()}-{info.number}",
            uri=tracker.uri,
            experiment=tracker.experiment,
            name=hide_secrets(name)[:RUN_NAME_LENGTH],
            time_ms=int(before_begin.get("started_ms", time_ms)),
            artifacts=own_artifacts(tracker.folder, tracker.uri, tracker.experiment),
            continues=before.key if before else None,
            resume=info.resume,
            tags=tags,
        )

    def _continued(self) -> SpooledRun | None:
        """Return the run that a failed attempt at this cell has begun."""
        if self._info.continues is None:
            return None
        run = SpooledRun(spool_of(self._tracker.folder) / self._info.continues)
        return run if run.summary() else None

    def _resumed(self) -> SpooledRun | None:
        """Return the newest run of this cell's name, as far as this folder knows one."""
        tracker, info = self._tracker, self._info
        facts = self._facts()
        name = info.run_name or run_name(facts.get("layout", ""), len(info.ranks), info.params)
        wanted = {"name": name, "experiment": tracker.experiment, "uri": tracker.uri}
        for run in spooled_runs(tracker.folder):
            summary = run.summary()
            if all(summary.get(key) == value for key, value in wanted.items()):
                return run
        return None

    def _facts(self) -> dict[str, str]:
        # dict() copies in one step of the interpreter; the IO thread may be adding to it.
        facts = dict(self._telemetry.facts)
        return merge_facts(facts[rank] for rank in sorted(facts))

    def _params(self) -> dict[str, str]:
        info = self._info
        own: Mapping[str, Any] = {
            "world_size": len(info.ranks),
            "backend": info.backend,
            "devices": ", ".join(dict.fromkeys(info.devices)),
        }
        return params_of(own) | params_of(info.params)

    def _write_facts(self, writer: SpoolWriter, settled_only: bool) -> None:
        """Write facts as params, each once: a param that changed would be refused.

        A fact is settled when every rank has told its own.
        """
        told = dict(self._telemetry.facts)
        taken = {*self._params()}
        fresh: dict[str, str] = {}
        tags: dict[str, str] = {}
        for key, value in self._facts().items():
            by_all = all(key in told.get(rank, {}) for rank in self._info.ranks)
            if key in self._facts_told or (settled_only and not by_all):
                continue
            self._facts_told.add(key)
            if key in _TAG_FACTS or key in taken:
                tags[f"nbdist.{key}"] = hide_secrets(value)
            else:
                fresh |= params_of({key: value})
        if fresh:
            writer.params(fresh)
        if tags:
            writer.tags(tags)

    def _write_summary(self, writer: SpoolWriter, series: Series, status: str) -> None:
        begin, info = self._begin, self._info
        assert begin is not None
        writer.summary(
            {
                "name": begin.name,
                "experiment": begin.experiment,
                "uri": begin.uri,
                "status": status,
                "cell": info.number,
                "started_ms": begin.time_ms,
                "updated_ms": max(begin.time_ms, time.time_ns() // 1_000_000),
                "steps": series.steps,
                "last_step": series.last_step,
                "values": series.summary(),
                "user_keys": series.user_keys,
                "params": params_of(info.params),
                "layout": self._facts().get("layout", ""),
                "world_size": len(info.ranks),
                "ranks": info.ranks,
                "continues": begin.continues,
                "lost": self._lost,
            }
        )


@dataclass(frozen=True, slots=True)
class _End:
    outcome: Outcome
    error: str | None
    picture: bytes | None
    files: Mapping[str, Path]
    time_ms: int
