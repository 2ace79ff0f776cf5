"""List, find and compare a notebook's runs by the spool: at once, with or without MLflow."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nbdist.client.tracking.past.compare import WHAT_RECENT_IS, Comparison, entry_of
from nbdist.client.tracking.past.tables import html_table, number, text_table, used_columns, whole
from nbdist.client.tracking.settings import shown_uri
from nbdist.client.tracking.spool import SpooledRun, spool_of, spooled_runs
from nbdist.shared.errors import TrackingError, UsageError

_MOST_PARAMS = 4
_MOST_LOGGED = 3
_MOST_NAMED = 6
_MOST_LOSSES = 4  # of trainings in one cell, before the newest
_BEFORE = ("continues", "starts_over")  # what names an earlier run that is no row of its own
_MOST_SEARCHED = 1000  # runs, for one of a name
# Of a summary what a row has as it stands; summaries of earlier versions lack some of the last.
_SAME_FIELDS = (
    *("name", "cell", "layout", "world_size", "steps", "params", "values"),
    *("kind", "study", "facts", "attempt", "losses_before", "changes", "numerics"),
)
_OF_A_STUDY: Mapping[str, Any] = {"layout": "", "steps": 0, "values": {}, "user_keys": ()}
_NO_BOARD_YET = {
    "running": ("its cell still runs in another kernel", "wait until it has ended"),
    "killed": (
        "its kernel ended before its cell did, and a board is kept at the end",
        "%dist runs and %dist ui show what was recorded",
    ),
}


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run, as the kernel that made it has last written it.

    `state` is "running", "finished", "failed", "interrupted", or "killed" when its kernel died.
    `values` are the last flat values (`loss`, `step_ms`, ..., and what was logged). `is_sent` says
    whether MLflow has all of it; `waits_for` why not, if that is known. `run_id` is MLflow's.
    `kind` is "study" for the run that holds a sweep's, `study` the key of that one in each of them.
    `facts` are all that may tell it from other runs: params, layout, versions. `attempt` counts
    those at the same cell, from 1: all before it have failed. `losses_before` are the last losses
    of the trainings in the cell before the one whose loss is in `values`. `changes` tells what was
    changed by hand while it trained, `numerics` the folder of what its steps have computed.
    """

    name: str
    state: str
    cell: int
    layout: str
    world_size: int
    steps: int
    seconds: float
    started: datetime
    params: dict[str, str]
    values: dict[str, float]
    logged: tuple[str, ...]
    is_sent: bool
    is_lost: bool
    waits_for: str
    refused: int
    run_id: str
    uri: str
    key: str
    kind: str = "run"
    study: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 1
    losses_before: Sequence[float] = ()
    changes: Sequence[str] = ()
    numerics: str = ""


@dataclass(frozen=True, slots=True)
class RunsTable:
    """Runs, newest first; prints as a text table and shows as an HTML one.

    `older` is how many more there are.
    """

    rows: tuple[RunRow, ...]
    older: int = 0

    def __str__(self) -> str:
        """Return a table of plain text; it begins with its header."""
        if not self.rows:
            return _NONE
        return "\n".join([*text_table(*cells(self.rows)), *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if not self.rows:
            return f"<p>{html.escape(_NONE)}</p>"
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self._notes())
        return html_table(*cells(self.rows)) + notes

    def _notes(self) -> list[str]:
        notes = []
        if self.older:
            many = "is 1 older run" if self.older == 1 else f"are {self.older} older runs"
            notes.append(f"There {many}; %dist runs NAME, %dist board NAME and %dist ui show them.")
        if any("loss" in row.values or row.logged for row in self.rows):
            notes.append(WHAT_LAST_IS)
        if any("step_ms" in row.values for row in self.rows):
            notes.append(WHAT_RECENT_IS)
        if any(row.attempt > 1 for row in self.rows):
            notes.append(WHAT_ATTEMPTS_ARE)
        if any(row.losses_before for row in self.rows):
            notes.append(WHAT_TRAININGS_ARE)
        notes += [
            f"{row.name}, changed by hand: {'; '.join(row.changes)}."
            for row in self.rows
            if row.changes
        ]
        kept = [row for row in self.rows if not row.is_sent and row.state != "running"]
        if why := next((row for row in kept if row.waits_for), None):
            notes.append(
                f"MLflow at {why.uri} does not have {len(kept)} of them yet ({why.waits_for}). "
                "%dist runs --sync tries again."
            )
        if lost := sum(row.is_lost for row in self.rows):
            notes.append(f"{lost} of them were lost when MLflow's database was deleted.")
        if refused := sum(row.refused for row in self.rows):
            notes.append(f"MLflow refused {refused} points; see .nbdist/logs/tracking.log.")
        return notes


WHAT_LAST_IS = (
    "Last loss and other last values: of the last step, the mean of the ranks that made it."
)
WHAT_TRAININGS_ARE = (
    "last loss: of a cell with several trainings, such as folds, that of each in order. They are "
    "one run; steps and all other numbers are those of the cell."
)
WHAT_ATTEMPTS_ARE = (
    "attempt: those before it failed. Of a cell that started over, all numbers are the newest "
    'attempt\'s; MLflow keeps the others, as "RUN (attempt 1)".'
)
_NONE = "No runs yet: a run begins with a cell's first optimizer step or nbdist.log."


def runs(folder: Path, experiment: str | None = None, limit: int = 20) -> tuple[RunRow, ...]:
    """Return the runs kept in the private folder `folder`, newest first.

    A run that a later cell continued stands there once, as the later cell left it; so does one that
    failed and was made again from the beginning.

    Args:
        folder: The private folder beside the notebook.
        experiment: Only its runs; all when None, for notebooks in one folder share it.
        limit: The most rows.
    """
    rows: list[RunRow] = []
    continued: set[str] = set()
    for run in spooled_runs(folder):
        summary = run.summary()
        if not summary or (experiment is not None and summary["experiment"] != experiment):
            continue
        continued |= {key for name in _BEFORE if (key := summary.get(name))}
        if run.key not in continued:
            rows.append(_row(run, summary))
        if len(rows) == limit:
            break
    return _nested(rows)


def find_run(folder: Path, experiment: str | None, word: str, also: Sequence[str] = ()) -> RunRow:
    """Return the run that a word means: the newest of that name, else the one of that number.

    Args:
        folder: The private folder beside the notebook.
        experiment: The notebook's.
        word: A name, or a number as `%dist runs` shows it.
        also: Words that would have been right too: they may be what was meant.

    Raises:
        UsageError: There is none; one line names the newest runs.
    """
    rows = runs(folder, experiment, limit=_MOST_SEARCHED)
    if named := [row for row in rows if row.name == word]:
        return _newest(named)
    listed = runs(folder, experiment)
    if word.isdecimal() and 1 <= int(word) <= len(listed):
        return listed[int(word) - 1]
    names = list(dict.fromkeys(row.name for row in rows))
    close = get_close_matches(word, [*also, *names], n=1)
    said = f"No run{' or view' if also else ''} is called {word!r}"
    said += f"; did you mean {close[0]}?" if close else "."
    newest = f"The newest runs: {', '.join(names[:_MOST_NAMED])}." if names else "No runs yet."
    raise UsageError(f"{said} {newest}")


def select(folder: Path, experiment: str | None, words: Sequence[str]) -> tuple[RunRow, ...]:
    """Return the runs that these words name, each once, in their order; of a sweep all its runs.

    Raises:
        UsageError: A word names no run.
    """
    chosen: dict[str, RunRow] = {}
    for word in words:
        row = find_run(folder, experiment, word)
        named = _runs_of(folder, experiment, row) if row.kind == "study" else [row]
        chosen |= {run.key: run for run in named}
    return tuple(chosen.values())


def kept_board(folder: Path, experiment: str, row: RunRow) -> bytes:
    """Return what the board of a run is drawn from.

    Raises:
        TrackingError: It has none; it says why.
    """
    board = SpooledRun(spool_of(folder) / row.key).board()
    if board is not None:
        return board
    if row.kind == "study":
        names = ", ".join(run.name for run in _runs_of(folder, experiment, row)[:_MOST_NAMED])
        why, do = "it is a sweep: each of its runs has one", f"name one of them: {names}"
    elif not row.steps and not row.logged and row.state not in _NO_BOARD_YET:
        why, do = "its cell made no step and logged nothing", "%dist runs shows how it ended"
    else:
        older = (
            "it was too large to keep, or made before boards were kept",
            "%dist ui shows what was recorded",
        )
        why, do = _NO_BOARD_YET.get(row.state, older)
    raise TrackingError(f"Run {row.name} has no board.", why=why, do=do)


def _newest(rows: Iterable[RunRow]) -> RunRow:
    return max(rows, key=lambda row: row.key)  # keys sort by time


def _runs_of(folder: Path, experiment: str | None, study: RunRow) -> list[RunRow]:
    """Return the runs of a sweep, in the order they ran."""
    rows = runs(folder, experiment, limit=_MOST_SEARCHED)
    return [row for row in rows if row.study == study.key]


def require_run(folder: Path, experiment: str, name: str) -> None:
    """Check that a cell can go on with the run called `name`, as far as `folder` knows.

    A name that is not known here may still be one in MLflow. An older run of a sweep's name is not
    what is meant: the newest of a name goes on, and that is the sweep.

    Raises:
        UsageError: It is a sweep's, which is no run to go on with.
    """
    rows = runs(folder, experiment, limit=_MOST_SEARCHED)
    named = [row for row in rows if row.name == name]
    if not named or _newest(named).kind != "study":
        return
    inner = [row.name for row in _runs_of(folder, experiment, _newest(named))]
    more = ", ..." if len(inner) > _MOST_NAMED else ""
    raise UsageError(
        f"{name} is a sweep, and --resume continues one run: give --run one of its runs"
        + (f", {', '.join(inner[:_MOST_NAMED])}{more}." if inner else ".")
    )


def compare(folder: Path, rows: Sequence[RunRow]) -> Comparison:
    """Return these runs beside each other, by what the spool in `folder` has kept of them."""
    names = [row.name for row in rows]
    entries = []
    for row in rows:
        # Runs of one name differ in their cells.
        name = row.name if names.count(row.name) == 1 else f"{row.name} (cell {row.cell})"
        facts = {**row.params, "layout": row.layout, "ranks": str(row.world_size)}
        facts |= {k: v for k, v in row.facts.items() if k not in (*facts, "world_size")}
        curves = SpooledRun(spool_of(folder) / row.key).curves()
        logged = {key: row.values[key] for key in row.logged if key in row.values}
        entries.append(entry_of(name, row.state, row.steps, facts, curves, logged))
    return Comparison(tuple(entries))


def _nested(rows: Sequence[RunRow]) -> tuple[RunRow, ...]:
    """Return rows with a sweep's runs below the one that holds them, in the order they ran."""
    studies = {row.key for row in rows if row.kind == "study"}
    nested: list[RunRow] = []
    for row in rows:
        if row.study in studies:
            continue
        nested.append(row)
        nested += [inner for inner in reversed(rows) if inner.study == row.key]
    return tuple(nested)


def runs_table(folder: Path, experiment: str | None = None, limit: int = 20) -> RunsTable:
    """Return `runs` as a table for people."""
    found = runs(folder, experiment, limit=_MOST_SEARCHED)
    rows = runs(folder, experiment, limit)
    return RunsTable(rows, len(found) - len(rows))


def _row(run: SpooledRun, summary: dict[str, Any]) -> RunRow:
    state = run.state()
    summary = {**_OF_A_STUDY, **summary}
    status = summary["status"]
    if status == "running" and not run.is_owned():
        status = "killed"
    same = {name: summary[name] for name in _SAME_FIELDS if name in summary}
    return RunRow(
        **same,
        state=status,
        seconds=max(0, summary["updated_ms"] - summary["started_ms"]) / 1000,
        started=datetime.fromtimestamp(summary["started_ms"] / 1000).astimezone(),
        logged=tuple(summary["user_keys"]),
        is_sent=state.is_done,
        is_lost=state.is_lost,
        waits_for=state.error,
        refused=state.refused,
        run_id=state.run_id,
        uri=shown_uri(summary["uri"]),
        key=run.key,
    )


def cells(rows: Sequence[RunRow]) -> tuple[list[str], list[list[str]]]:
    """Return the table's header and its rows as texts; an empty column is left out."""
    params = list(dict.fromkeys(key for row in rows for key in row.params))[:_MOST_PARAMS]
    logged = list(dict.fromkeys(key for row in rows for key in row.logged if key != "loss"))
    header = ["#", "run", "state", "attempt", "layout", "ranks", *params, "steps", "last loss"]
    header += [f"last {key}" for key in logged[:_MOST_LOGGED]]
    header += ["step ms", "samples/s", "comm %", "data %", "seconds", "started"]
    header += ["in MLflow"]
    body = []
    for place, row in enumerate(rows, 1):
        value = row.values.get
        name = f"└ {row.name}" if row.study else row.name
        attempt = str(row.attempt) if row.attempt > 1 else ""
        texts = [str(place), name, row.state, attempt, row.layout]
        texts += [str(row.world_size), *(row.params.get(key, "") for key in params)]
        texts += [str(row.steps) if row.kind == "run" else "", _last_losses(row)]
        texts += [number(value(key)) for key in logged[:_MOST_LOGGED]]
        texts += [number(value("step_ms")), number(value("samples_per_s"))]
        texts += [whole(value("comm_pct")), whole(value("data_pct"))]
        texts += [f"{row.seconds:.1f}", f"{row.started:%m-%d %H:%M}"]
        texts += ["lost" if row.is_lost else "yes" if row.is_sent else "not yet"]
        body.append(texts)
    return used_columns(header, body)


def _last_losses(row: RunRow) -> str:
    losses = [*row.losses_before[-_MOST_LOSSES:], row.values.get("loss")]
    cut = "..., " if len(row.losses_before) > _MOST_LOSSES else ""
    return cut + ", ".join(map(number, losses))
