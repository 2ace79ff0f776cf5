"""Keep the runs of one sweep together: a run of its own in MLflow, under which they are nested.

MLflow nests a run under the one that its tag `mlflow.parentRunId` names. The study says what was
tried, and at its end what came of it: a table, and which was best.

Threads: `begin` is called on the own thread of the first run that is nested under it, `finish` on
the main one, which waits for the disk 5 s at most.
"""

import csv
import io
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence

from nbdist.client.metrics.telemetry import CellInfo
from nbdist.client.tracking import provenance
from nbdist.client.tracking.begin import RunPlace, new_key, own_params, summary_of
from nbdist.client.tracking.folder import make_private_folder
from nbdist.client.tracking.hiding import hide_in_code, hide_secrets
from nbdist.client.tracking.names import asked_name, params_of
from nbdist.client.tracking.settings import own_artifacts
from nbdist.client.tracking.spool import Begin, SpoolWriter, spool_of
from nbdist.client.tracking.writing import STATUS, Outcome

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
        self._values = values
        self._info: CellInfo | None = None
        self._spool: SpoolWriter | None = None
        self._begin: Begin | None = None
        self._is_over = False
        self._lock = threading.Lock()  # a run that hangs on the disk may still be beginning

    @property
    def has_begun(self) -> bool:
        """Whether a run is nested under it."""
        return self._begin is not None

    def begin(self, info: CellInfo, time_ms: int) -> None:
        """Begin, unless it has begun; `info` is the cell of the first of its runs.

        Raises:
            OSError: The disk does not take it.
            TrackingError: The private folder cannot be made.
        """
        with self._lock:
            if self._begin is not None or self._is_over:
                return
            place = self._place
            make_private_folder(place.folder)
            tags = provenance.source_tags(place.experiment, info.number, place.folder.parent)
            self._info = info
            begin = Begin(
                key=self.key,
                uri=place.uri,
                experiment=place.experiment,
                name=self._name,
                time_ms=time_ms,
                artifacts=own_artifacts(place.folder, place.uri, place.experiment),
                tags=tags | {"nbdist.kind": "study", "nbdist.varied": ", ".join(self._values)},
            )
            self._spool = SpoolWriter(spool_of(place.folder), begin)
            self._begin = begin
            self._spool.params(self._params(info))
            self._spool.file("cell.py", hide_in_code(self._source).encode())
            self._spool.file("environment.txt", provenance.environment_text().encode())
            self._write_summary("running")
            self._spool.flush()

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
                if self._is_over or self._spool is None or self._begin is None:
                    self._is_over = True
                    return
                self._is_over = True
                try:
                    self._write_end(self._spool, self._begin, outcome, error, rows, best)
                finally:
                    self._spool.close()
        except Exception as failure:
            # Its runs are whole without it.
            _log.warning("the study %s was not written whole: %s", self._name, failure)

    def _write_end(
        self,
        spool: SpoolWriter,
        begin: Begin,
        outcome: Outcome,
        error: str | None,
        rows: Sequence[Mapping[str, object]],
        best: str,
    ) -> None:
        if rows:
            spool.file("study.csv", as_csv(rows).encode())
            spool.file(TABLE, as_table(rows).encode())
            spool.tags({"mlflow.loggedArtifacts": json.dumps([{"path": TABLE, "type": "table"}])})
        if best:
            spool.tags({"nbdist.best": best[:1000]})
        if error:
            text = hide_secrets(error).strip()
            spool.tags({"nbdist.error": text.splitlines()[0][:250] if text else ""})
        spool.end(STATUS[outcome], max(begin.time_ms, time.time_ns() // 1_000_000))
        self._write_summary(outcome)
        spool.flush(to_disk=True)

    def _params(self, info: CellInfo) -> dict[str, str]:
        return own_params(info) | params_of(self._tried)

    @property
    def _tried(self) -> dict[str, list[object]]:
        return {key: list(values) for key, values in self._values.items()}

    def _write_summary(self, status: str) -> None:
        begin, info = self._begin, self._info
        assert begin is not None
        assert info is not None
        assert self._spool is not None
        summary = summary_of(begin, info, status) | {
            "kind": "study",
            "steps": 0,
            "last_step": 0,
            "values": {},
            "user_keys": [],
            "params": params_of(self._tried),
            "layout": "",
            "lost": 0,
        }
        self._spool.summary(summary)


def as_csv(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as a CSV file; what a row does not have stays empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def as_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows in the form of `mlflow.log_table`: JSON of columns and data."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    data = [[_plain(row.get(column)) for column in columns] for row in rows]
    return json.dumps({"columns": columns, "data": data})


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
