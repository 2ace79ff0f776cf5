"""Keep the runs of one sweep together: a run of its own in MLflow, under which they are nested.

MLflow nests a run under the one that its tag `mlflow.parentRunId` names. The study says what was
tried, and at its end what came of it: a table, and which was best.

Threads: `begin` is called on the own thread of the first run that is nested under it, `finish` on
the main one, which waits for the disk 5 s at most.
"""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nbdist.client.metrics.telemetry import CellInfo
from nbdist.client.tracking import provenance
from nbdist.client.tracking.begin import RunPlace, new_key, own_params, summary_of
from nbdist.client.tracking.folder import make_private_folder
from nbdist.client.tracking.hiding import hide_in_code, hide_secrets
from nbdist.client.tracking.names import asked_name, params_of
from nbdist.client.tracking.settings import own_artifacts
from nbdist.client.tracking.spool import Begin, SpoolWriter, spool_of
from nbdist.client.tracking.writing import Outcome, write_end

FINISH_TIMEOUT_S = 5.0
TABLE = "table.json"  # MLflow's UI shows it as a table

_log = logging.getLogger("nbdist.tracking")


class Study:
    """One sweep's run. Made by `Tracker.begin_study`; `key` is what its runs name it by."""

    def __init__(
        self, place: RunPlace, name: str, source: str, values: Mapping[str, Sequence[object]]
    ) -> None:
        self.key = new_key(0)
        self._place = place
        self._name = asked_name(name)
        self._source = source
        self._values = {key: list(tried) for key, tried in values.items()}
        self._summary: dict[str, Any] = {}
        self._spool: SpoolWriter | None = None
        self._is_over = False
        self._lock = threading.Lock()  # a run that hangs on the disk may still be beginning

    @property
    def has_begun(self) -> bool:
        """Whether a run is nested under it."""
        return self._spool is not None

    def begin(self, info: CellInfo, time_ms: int) -> None:
        """Begin, unless it has begun; `info` is the cell of the first of its runs.

        Raises:
            OSError: The disk does not take it.
            TrackingError: The private folder cannot be made.
        """
        with self._lock:
            if self._spool is not None or self._is_over:
                return
            place = self._place
            make_private_folder(place.folder)
            tags = provenance.source_tags(place.experiment, info.number, place.folder.parent)
            begin = Begin(
                key=self.key,
                uri=place.uri,
                experiment=place.experiment,
                name=self._name,
                time_ms=time_ms,
                artifacts=own_artifacts(place.folder, place.uri, place.experiment),
                tags=tags | {"nbdist.kind": "study", "nbdist.varied": ", ".join(self._values)},
            )
            params = params_of(self._values)
            self._summary = summary_of(begin, info, "running") | {"kind": "study", "params": params}
            spool = self._spool = SpoolWriter(spool_of(place.folder), begin, self._summary)
            spool.params(own_params(info) | params)
            spool.file("cell.py", hide_in_code(self._source).encode())
            spool.file("environment.txt", provenance.environment_text().encode())
            spool.flush()

    def finish(
        self,
        outcome: Outcome,
        error: str | None = None,
        rows: Sequence[Mapping[str, object]] = (),
        best: str = "",
    ) -> None:
        """End it; without a run that began, nothing is left of it.

        Args:
            outcome: How the sweep ended.
            error: The text of what ended it, for people.
            rows: One a run: what it tried, and what came of it.
            best: Which was best, in a sentence.
        """
        thread = threading.Thread(
            target=self._finish,
            args=(outcome, error, rows, best),
            name="nbdist-tracking",
            daemon=True,
        )
        thread.start()
        thread.join(FINISH_TIMEOUT_S)

    def _finish(
        self, outcome: Outcome, error: str | None, rows: Sequence[Mapping[str, object]], best: str
    ) -> None:
        try:
            with self._lock:
                was_over, self._is_over = self._is_over, True
                if was_over or self._spool is None:
                    return
                with contextlib.closing(self._spool) as spool:
                    self._write_end(spool, outcome, error, rows, best)
        except Exception as failure:
            # Its runs are whole without it.
            _log.warning("the study %s was not written whole: %s", self._name, failure)

    def _write_end(
        self,
        spool: SpoolWriter,
        outcome: Outcome,
        error: str | None,
        rows: Sequence[Mapping[str, object]],
        best: str,
    ) -> None:
        if rows:
            spool.file(TABLE, as_table(rows).encode())
            spool.tags({"mlflow.loggedArtifacts": json.dumps([{"path": TABLE, "type": "table"}])})
        if best:
            spool.tags({"nbdist.best": best[:1000]})
        if error and outcome == "failed":
            text = hide_secrets(error).strip()
            spool.tags({"nbdist.error": text.splitlines()[0][:250] if text else ""})
        ended_ms = max(self._summary["started_ms"], time.time_ns() // 1_000_000)
        write_end(spool, outcome, ended_ms)
        spool.flush(to_disk=True)  # first, as of a run
        spool.summary(self._summary | {"status": outcome, "updated_ms": ended_ms})


def as_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows in the form of `mlflow.log_table`: JSON of columns and data."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    data = [[_plain(row.get(column)) for column in columns] for row in rows]
    return json.dumps({"columns": columns, "data": data})


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
