"""List a notebook's runs from the spool's summaries: at once, with or without MLflow."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from nbdist.client.tracking.settings import shown_uri
from nbdist.client.tracking.spool import SpooledRun, spooled_runs

_MOST_PARAMS = 4
_MOST_LOGGED = 3


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run, as the kernel that made it has last told.

    `state` is "running", "finished", "failed", "interrupted", or "killed" when its kernel died.
    `values` are the last flat values (`loss`, `step_s`, ..., and what was logged). `is_sent` says
    whether MLflow has all of it; `waits_for` why not, if that is known. `run_id` is MLflow's.
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
    waits_for: str
    refused: int
    run_id: str
    uri: str
    key: str


@dataclass(frozen=True, slots=True)
class RunsTable:
    """Runs, newest first; prints as a text table and shows as an HTML one."""

    rows: tuple[RunRow, ...]

    def __str__(self) -> str:
        """Return a table of plain text; it begins with its header."""
        if not self.rows:
            return _NONE
        header, body = cells(self.rows)
        widths = [max(len(row[i]) for row in (header, *body)) for i in range(len(header))]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            for row in (header, *body)
        ]
        return "\n".join([*lines, *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if not self.rows:
            return f"<p>{html.escape(_NONE)}</p>"
        header, body = cells(self.rows)
        head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in header)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>"
            for row in body
        )
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self._notes())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{notes}"

    def _notes(self) -> list[str]:
        notes = []
        kept = [row for row in self.rows if not row.is_sent and row.state != "running"]
        if why := next((row for row in kept if row.waits_for), None):
            notes.append(
                f"MLflow at {why.uri} does not have {len(kept)} of them yet ({why.waits_for}). "
                "%dist runs --sync tries again."
            )
        if refused := sum(row.refused for row in self.rows):
            notes.append(f"MLflow refused {refused} points; see .nbdist/logs/tracking.log.")
        return notes


_NONE = "No runs yet: a run begins with a cell's first optimizer step or nbdist.log."


def runs(folder: Path, experiment: str | None = None, limit: int = 20) -> tuple[RunRow, ...]:
    """Return the runs kept in the private folder `folder`, newest first.

    A run that a later cell continued stands there once, as the later cell left it.

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
        if summary.get("continues"):
            continued.add(summary["continues"])
        if run.key not in continued:
            rows.append(_row(run, summary))
        if len(rows) == limit:
            break
    return tuple(rows)


def runs_table(folder: Path, experiment: str | None = None, limit: int = 20) -> RunsTable:
    """Return `runs` as a table for people."""
    return RunsTable(runs(folder, experiment, limit))


def _row(run: SpooledRun, summary: dict[str, Any]) -> RunRow:
    state = run.state()
    status = summary["status"]
    if status == "running" and not run.is_owned():
        status = "killed"
    return RunRow(
        name=summary["name"],
        state=status,
        cell=summary["cell"],
        layout=summary["layout"],
        world_size=summary["world_size"],
        steps=summary["steps"],
        seconds=max(0, summary["updated_ms"] - summary["started_ms"]) / 1000,
        started=datetime.fromtimestamp(summary["started_ms"] / 1000).astimezone(),
        params=summary["params"],
        values=summary["values"],
        logged=tuple(summary["user_keys"]),
        is_sent=state.is_done,
        waits_for=state.error,
        refused=state.refused,
        run_id=state.run_id,
        uri=shown_uri(summary["uri"]),
        key=run.key,
    )


def cells(rows: Sequence[RunRow]) -> tuple[list[str], list[list[str]]]:
    """Return the table's header and its rows as texts; a column nobody fills is left out."""
    params = list(dict.fromkeys(key for row in rows for key in row.params))[:_MOST_PARAMS]
    logged = list(dict.fromkeys(key for row in rows for key in row.logged if key != "loss"))
    header = ["run", "state", "layout", "ranks", *params, "steps", "loss", *logged[:_MOST_LOGGED]]
    header += ["step ms", "samples/s", "comm %", "seconds", "started", "in MLflow"]
    body = []
    for row in rows:
        value = row.values.get
        texts = [row.name, row.state, row.layout, str(row.world_size)]
        texts += [row.params.get(key, "") for key in params]
        texts += [str(row.steps), _number(value("loss"))]
        texts += [_number(value(key)) for key in logged[:_MOST_LOGGED]]
        step_s = value("step_s")
        texts += [_number(None if step_s is None else step_s * 1000)]
        texts += [_number(value("samples_per_s")), _number(value("comm_pct"))]
        texts += [f"{row.seconds:.1f}", f"{row.started:%m-%d %H:%M}"]
        texts += ["yes" if row.is_sent else "not yet"]
        body.append(texts)
    used = [i for i, _ in enumerate(header) if any(row[i] for row in body)]
    return [header[i] for i in used], [[row[i] for i in used] for row in body]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    # Four digits, but no exponent before it saves room: 17,430 reads better than 1.743e+04.
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
