"""Keep every run on disk first, as operations that are sent to MLflow later, or never.

A run is a folder `<private folder>/spool/<key>/`; keys sort by time. Two processes write into it,
each into its own files:

- the kernel appends to `ops.jsonl`, one operation a line, replaces `summary.json` and now and then
  `curves.json`, and holds `owner.lock` as long as the run goes on: the run of a dead kernel is one
  whose lock is free;
- the shipping process replaces `state.json`: how far it has come, and in which MLflow run.

`ops.jsonl` is the run's journal. Its first line is `begin`. Then come rows of metrics,
`[time_ms, step, {key: value}]`, for they are many, and objects with an `op`: `params`, `tags`,
`file` (its bytes lie in `files/`), `model` (its folder, too), `end`. What is sent twice is stored
once, for time, step and value are always those of the record.

When all has been sent, `ops.jsonl` and `files/` go; summary and curves stay, for `%dist runs`, and
`board.json.gz`, which the kernel writes last, for `%dist board RUN`.
"""

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from nbdist.client.tracking.folder import (
    is_locked,
    open_private,
    read_json,
    try_lock,
    write_private,
)
from nbdist.client.tracking.series import Point

VERSION = 1
# Why a run waits without anything to do: it passes by itself.
PREPARING = "another process is preparing the database"
CONTINUED_UNSENT = "the run that it continues has not been sent yet"
STUDY_UNSENT = "the study that it belongs to has not been sent yet"
_PASSING = frozenset({PREPARING, CONTINUED_UNSENT, STUDY_UNSENT})
MOST_POINTS = 1000  # MLflow's limit for one log_batch
_LOGGED = frozenset({"begin", "params", "tags"})  # what may travel with rows of metrics
_ALONE = frozenset({"file", "model", "end"})
_KEPT_SUMMARIES = 500
_OLD_DRAFT_S = 60.0  # a run has its name milliseconds after its folder was made
_BOARD = "board.json.gz"


@dataclass(frozen=True, slots=True)
class Begin:
    """What is known when a run begins.

    `uri` names the tracking server or database, `artifacts` the place for the experiment's files
    where the client chooses it (None: the server's business). `continues` is the key of the run in
    this spool that this one goes on with, `first_step` what was added to its steps for that;
    `resume` asks for the newest run of that name, which may only be on the server. `study` is the
    key of the run under which this one is nested. `starts_over` is the key of the run of the failed
    attempt which this one makes again from the beginning, `attempt` counts them from 1.
    """

    key: str
    uri: str
    experiment: str
    name: str
    time_ms: int
    artifacts: str | None = None
    continues: str | None = None
    resume: bool = False
    first_step: int = 0
    study: str | None = None
    starts_over: str | None = None
    attempt: int = 1
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class SpoolState:
    """How far the shipping process has come with a run.

    `offset` counts bytes of `ops.jsonl` that MLflow has; `creating` is set while a run is asked
    for, so that an answer that got lost does not make a second one. `error` is why the last
    attempt failed, empty when it did not. `refused` counts points and entries MLflow will never
    take (the log says why), `attempts` the failures to store the artifact that comes next.
    `first_step` is added to
    steps when another run is continued than the kernel knew of; `resumed` says which was:
    "there" (only MLflow had it), "none" of that name, or "" (ours, or not known yet).
    `is_done` says that MLflow has all of it, `is_lost` that it has lost it since.
    """

    offset: int = 0
    run_id: str = ""
    experiment_id: str = ""
    creating: bool = False
    first_step: int = 0
    resumed: str = ""
    sent: int = 0
    attempts: int = 0
    refused: int = 0
    error: str = ""
    is_done: bool = False
    is_lost: bool = False

    @property
    def trouble(self) -> str:
        """Why the last attempt failed; empty also where that passes by itself."""
        return "" if self.error in _PASSING else self.error

    def start_over(self) -> "SpoolState":
        """Return the state of a run of which nothing was sent."""
        return SpoolState(error=self.error)


Entry = Point | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """The next entries of a journal that may travel together, and where in the file they end.

    A file, a model and the end travel alone. `damaged` counts lines that say nothing.
    """

    entries: list[Entry]
    offset: int
    damaged: int = 0


class SpoolWriter:
    """The kernel's side of one run. Every method may raise OSError; used by one thread."""

    def __init__(self, spool: Path, begin: Begin, summary: Mapping[str, Any]) -> None:
        self.folder = spool / begin.key
        # Made under another name first: a kernel may be killed here, and whoever finds the run
        # finds it locked, begun and with a summary.
        draft = spool / f".{begin.key}"
        try:
            (draft / "files").mkdir(mode=0o700, parents=True)
            for folder in (spool, draft):
                folder.chmod(0o700)
            with contextlib.ExitStack() as held:
                held.enter_context(try_lock(draft / "owner.lock"))
                self._ops = held.enter_context(open_private(draft / "ops.jsonl"))
                self._write({"op": "begin", "version": VERSION} | asdict(begin))
                self._ops.flush()
                _write_summary(draft, summary)
                os.rename(draft, self.folder)
                self._held = held.pop_all()
        finally:
            shutil.rmtree(draft, ignore_errors=True)  # there only where something failed

    def points(self, points: Iterable[Point]) -> None:
        """Append rows of metrics."""
        for point in points:
            self._write([point.time_ms, point.step, point.values])

    def params(self, values: Mapping[str, str]) -> None:
        """Append params; a param has one value for ever."""
        self._write({"op": "params", "values": dict(values)})

    def tags(self, values: Mapping[str, str]) -> None:
        """Append tags; a later value replaces an earlier one."""
        self._write({"op": "tags", "values": dict(values)})

    def file(self, name: str, content: bytes) -> None:
        """Keep an artifact; `name` is a file name, with a folder before it or none."""
        path = self.folder / "files" / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_private(path, content)
        self._write({"op": "file", "name": name})

    def model(self, content: Path, facts: Mapping[str, Any]) -> None:
        """Announce a model to be published, which `take` brings; `facts` as `sender` wants them.

        In this order, for what moved unannounced would go with the files of a dead kernel's run.
        """
        places = {"folder": _model(content), "left_at": str(content)}
        self._write({"op": "model", "facts": {**facts, **places}})
        self.flush()

    def take(self, content: Path) -> None:
        """Take over the folder of a model that was announced."""
        place = self.folder / "files" / _model(content)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.move(content, place)

    def end(self, status: str, time_ms: int) -> None:
        """Append the last operation; `status` is MLflow's."""
        self._write({"op": "end", "status": status, "time_ms": time_ms})

    def summary(self, values: Mapping[str, Any]) -> None:
        """Replace what `%dist runs` shows of this run."""
        _write_summary(self.folder, values)

    def curves(self, values: Mapping[str, Any]) -> None:
        """Replace what this run is compared with others by."""
        write_private(self.folder / "curves.json", json.dumps(values).encode())

    def board(self, content: bytes) -> None:
        """Keep what the board of this run is drawn from."""
        write_private(self.folder / _BOARD, content)

    def flush(self, to_disk: bool = False) -> None:
        """Hand what was written to the operating system, and to the disk if asked."""
        self._ops.flush()
        if to_disk:
            os.fsync(self._ops.fileno())

    def close(self) -> None:
        """Flush, close, and let go of the run."""
        self._held.close()

    def _write(self, row: object) -> None:
        self._ops.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")


class SpooledRun:
    """One run's folder, for those who read it and for the one who ships it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ops = folder / "ops.jsonl"

    @property
    def key(self) -> str:
        """The run's key; keys sort by time."""
        return self.folder.name

    def begin(self) -> Begin | None:
        """Return the first line; None when it was never written whole or is of another version."""
        try:
            with self.ops.open("rb") as file:
                row = json.loads(file.readline())
        except (FileNotFoundError, ValueError):
            return None
        if row.get("op") != "begin" or row.get("version") != VERSION:
            return None
        return Begin(**{f.name: row[f.name] for f in fields(Begin) if f.name in row})

    def state(self) -> SpoolState:
        """Return how far the shipping process has come."""
        saved = read_json(self.folder / "state.json")
        return SpoolState(**{f.name: saved[f.name] for f in fields(SpoolState) if f.name in saved})

    def save(self, state: SpoolState) -> None:
        """Write down how far we have come; the shipping process alone calls this."""
        write_private(self.folder / "state.json", json.dumps(asdict(state)).encode())

    def summary(self) -> dict[str, Any]:
        """Return the kernel's newest summary of the run; empty when it has written none."""
        return read_json(self.folder / "summary.json")

    def curves(self) -> dict[str, Any]:
        """Return what this run is compared by, some seconds old; empty in its first ones."""
        return read_json(self.folder / "curves.json")

    def board(self) -> bytes | None:
        """Return what the board of this run is drawn from; None where it kept none."""
        try:
            return (self.folder / _BOARD).read_bytes()
        except OSError:
            return None

    def is_owned(self) -> bool:
        """Return whether the kernel that writes this run is alive and still writing."""
        return is_locked(self.folder / "owner.lock")

    def read(self, offset: int, most_points: int = MOST_POINTS) -> Batch:
        """Return the entries that follow byte `offset`, as many as may travel together.

        A last line without its end is still being written and is left for the next call.
        """
        entries: list[Entry] = []
        size, damaged = 0.0, 0
        with self.ops.open("rb") as file:
            file.seek(offset)
            while (line := file.readline()).endswith(b"\n"):
                entry = _parse(line)
                if entry is None:
                    damaged += 1
                else:
                    size += _size(entry)
                    if entries and size > most_points:
                        break
                    entries.append(entry)
                offset += len(line)
        return Batch(entries, offset, damaged)

    def drop_content(self) -> None:
        """Remove what MLflow has by now; state and summary stay."""
        shutil.rmtree(self.folder / "files", ignore_errors=True)
        self.ops.unlink(missing_ok=True)


def _model(content: Path) -> str:
    """Return where among a run's files the folder `content` of a model comes to lie."""
    return f"models/{content.name}"


def _write_summary(folder: Path, values: Mapping[str, Any]) -> None:
    write_private(folder / "summary.json", json.dumps(values).encode())


def _parse(line: bytes) -> Entry | None:
    """Return a line's entry; None when a crash has damaged it."""
    try:
        row = json.loads(line)
        if isinstance(row, list):
            time_ms, step, values = row
            return Point(int(time_ms), int(step), {k: float(v) for k, v in values.items()})
        return row if row["op"] in _LOGGED | _ALONE else None
    except (ValueError, TypeError, AttributeError, LookupError):
        return None


def _size(entry: Entry) -> float:
    """Return how many points an entry has; infinitely many where it travels alone."""
    if isinstance(entry, Point):
        return len(entry.values)
    return math.inf if entry["op"] in _ALONE else 0


def spool_of(folder: Path) -> Path:
    """Return where the private folder `folder` keeps its runs."""
    return folder / "spool"


def spooled_runs(folder: Path) -> Iterator[SpooledRun]:
    """Return the runs kept in the private folder `folder`, newest first."""
    spool = spool_of(folder)
    if not spool.is_dir():
        return
    for name in sorted(os.listdir(spool), reverse=True):
        if name[:1].isdigit():
            yield SpooledRun(spool / name)


def forget_old(folder: Path) -> None:
    """Remove the summaries of runs sent long ago; unsent runs stay whatever their age.

    What a kernel has left that was killed before its run had a name goes, too.
    """
    for run in list(spooled_runs(folder))[_KEPT_SUMMARIES:]:
        if run.state().is_done and not run.ops.exists():
            shutil.rmtree(run.folder, ignore_errors=True)
    for draft in spool_of(folder).glob(".[0-9]*"):
        # A new one may not be locked yet.
        with contextlib.suppress(FileNotFoundError):  # it has its name by now
            is_old = time.time() - draft.stat().st_mtime > _OLD_DRAFT_S
            if is_old and not is_locked(draft / "owner.lock"):
                shutil.rmtree(draft, ignore_errors=True)
