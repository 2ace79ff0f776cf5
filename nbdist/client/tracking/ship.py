"""Send what the spool holds to MLflow: `python -m nbdist.client.tracking.ship FOLDER [--drain]`.

A process of its own, beside the kernel. Importing mlflow costs 1.5 s of work that holds the GIL
(another thread waits up to 0.1 s at a stretch), and MLflow takes its timeouts from the environment;
here neither touches the kernel or the user's own use of MLflow.

At least once: `state.json` moves on after MLflow has acknowledged, and what is sent again is
stored once, for MLflow keys a point by run, key, time, step and value.

What MLflow cannot take now stays and is tried again, later and later (up to 30 s). What it never
will take (a point already there under another spelling, a key it does not like) is searched for
by halving, left out and counted.

The kernel holds our standard input. When that closes, the kernel has ended or wants us to: we
send what we can within a few seconds and end. A run whose kernel died ends as KILLED.
"""

import argparse
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nbdist.client.tracking import view
from nbdist.client.tracking.folder import try_lock
from nbdist.client.tracking.names import hide_secrets
from nbdist.client.tracking.spool import MOST_POINTS, Begin, Chunk, SpooledRun, State, spooled_runs

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

PERIOD_S = 0.5  # between looks into the spool
IDLE_S = 120.0  # without any run going on, we end and free 200 MB
AFTER_KERNEL_S = 4.0  # how long we outlive a kernel that died
LONGEST_PAUSE_S = 30.0
_FEWEST_POINTS = 50
_ARTIFACT_ATTEMPTS = 3
# 400 and 409: this entry is wrong or already there; 413 and 422: too large, not understood.
# Everything else (no connection, 401, 404, 429, 5xx) may be different tomorrow.
_NEVER = frozenset({400, 409, 413, 422})

T = TypeVar("T")

_log = logging.getLogger("nbdist.tracking")


class _NotTaken(Exception):
    """MLflow did not do what was asked; the text says why, `is_final` that it never will."""

    def __init__(self, why: str, is_final: bool = False) -> None:
        super().__init__(why)
        self.is_final = is_final


class _Deleted(Exception):
    """Someone has deleted the run in MLflow, and that is their decision."""


@dataclass(slots=True)
class _Pause:
    """When to try something again that failed: after 1, 2, 4 ... 30 s."""

    length_s: float = 0.0
    until: float = 0.0

    def longer(self) -> None:
        """It has failed again."""
        self.length_s = min(max(1.0, self.length_s * 2), LONGEST_PAUSE_S)
        self.until = time.monotonic() + self.length_s

    def is_on(self) -> bool:
        """Return whether it is too early to try again."""
        return time.monotonic() < self.until


@dataclass(slots=True)
class _Server:
    """What we know of one tracking URI: its client, and when to try it next."""

    uri: str
    client: "MlflowClient | None" = None
    pause: "_Pause" = field(default_factory=lambda: _Pause())
    why: str = ""
    most_points: int = MOST_POINTS
    views: dict[str, str] = field(default_factory=dict)


class Shipper:
    """Sends the runs of one private folder.

    Args:
        folder: The private folder beside the notebook.
        kernel_pid: The runs this kernel is still writing are sent too; those of other living
            kernels are their own shippers' business. 0 for none.
    """

    def __init__(self, folder: Path, kernel_pid: int) -> None:
        self._folder = folder
        self._kernel_pid = kernel_pid
        self._servers: dict[str, _Server] = {}
        self._pauses: dict[str, _Pause] = {}  # runs that MLflow, though it answers, did not take
        self._artifact_failures: dict[tuple[str, str], int] = {}
        self.sent = 0

    def round(self, patient: bool = True) -> bool:
        """Send what there is; return whether a run is going on or something is left to send.

        Args:
            patient: Leave alone what failed a moment ago.
        """
        if not patient:
            self._pauses.clear()
            for server in self._servers.values():
                server.pause = _Pause()
        unfinished = False
        for run in reversed(list(spooled_runs(self._folder))):
            if not run.ops.exists():
                continue  # sent long ago
            is_owned = run.is_owned()
            if is_owned and run.key.split("-")[1] != str(self._kernel_pid):
                continue
            with try_lock(run.folder / "ship.lock") as mine:
                if not mine:
                    unfinished = True
                elif run.ops.exists():
                    unfinished |= not self._ship(run, is_owned)
        return unfinished

    def _ship(self, run: SpooledRun, is_owned: bool) -> bool:
        """Send what is new in `run`; return whether it is finished."""
        state, begin = run.state(), run.begin()
        if begin is None:
            if is_owned:
                return False
            _log.warning("run %s was damaged before it began and is left where it is", run.key)
            run.ops.rename(run.ops.with_suffix(".damaged"))
            return True
        server = self._servers.setdefault(begin.uri, _Server(begin.uri))
        if server.pause.is_on():
            self._note(run, state, server.why)
            return False
        if self._pauses.setdefault(run.key, _Pause()).is_on():
            return False
        try:
            self._send(run, begin, state, server, is_owned)
        except _NotTaken as error:
            self._pause(run, server)
            self._note(run, state, str(error))
            return False
        except _Deleted:
            state.is_done, state.why_refused = True, "the run was deleted in MLflow"
            run.save(state)
        server.pause = _Pause()
        del self._pauses[run.key]
        if state.error:
            state.error = ""
            run.save(state)
        if state.is_done:
            run.drop_content()
        return state.is_done

    def _client(self, server: _Server) -> Any:
        """Return the server's client, made on first use, one process at a time.

        Making it makes the tables of a new SQLite file; two processes that do so both fail.
        """
        if server.client is None:
            with try_lock(self._folder / "create.lock") as mine:
                if not mine:
                    raise _NotTaken("another process is preparing the database")
                from mlflow.tracking import MlflowClient

                client = _calling(lambda: MlflowClient(tracking_uri=server.uri))
                _calling(lambda: client.search_experiments(max_results=1))
                server.client = client
        return server.client

    def _pause(self, run: SpooledRun, server: _Server) -> None:
        """Wait before the next attempt: with the server when it is down, else with this run."""
        # A server that is only slow may still manage a smaller bite within its time.
        server.most_points = max(_FEWEST_POINTS, server.most_points // 2)
        try:
            client = self._client(server)
            _calling(lambda: client.search_experiments(max_results=1))
        except _NotTaken as error:
            server.why = str(error)
            server.pause.longer()
        else:
            self._pauses[run.key].longer()

    def _note(self, run: SpooledRun, state: State, why: str) -> None:
        if state.error != why:
            _log.warning("run %s waits: %s", run.key, why)
            state.error = why
            run.save(state)

    def _send(
        self, run: SpooledRun, begin: Begin, state: State, server: _Server, is_owned: bool
    ) -> None:
        client = self._client(server)
        if not state.run_id:
            _calling(lambda: self._open_run(run, begin, state, client))
            run.save(state)
        while not state.is_done:
            chunk = run.read(state.offset, server.most_points)
            if chunk.offset == state.offset:
                break
            self._send_chunk(run, state, client, chunk)
            state.offset = chunk.offset
            if chunk.damaged:
                state.refused += chunk.damaged
                state.why_refused = "lines of the spool were damaged"
            run.save(state)
            server.most_points = min(MOST_POINTS, server.most_points * 2)
        if not state.is_done and not is_owned:
            ended = {
                "status": "KILLED",
                "time_ms": run.summary().get("updated_ms", begin.time_ms),
            }
            _calling(lambda: client.set_tag(state.run_id, "nbdist.ended", "with its kernel"))
            self._end(state, client, ended)
            run.save(state)
        self._update_view(begin, state, server)

    def _open_run(self, run: SpooledRun, begin: Begin, state: State, client: Any) -> None:
        """Find or create the MLflow run; fills in its ids."""
        state.experiment_id = _experiment_id(client, begin)
        if begin.continues:
            before = SpooledRun(run.folder.parent / begin.continues).state()
            if not before.run_id:
                raise _NotTaken("the run that it continues has not been sent yet")
            state.run_id = before.run_id
        elif begin.resume:
            state.run_id, state.first_step = _newest_of_name(client, state, begin.name)
        if state.run_id:
            client.update_run(state.run_id, status="RUNNING")
            return
        if state.creating:
            # We asked before and the answer got lost: look whether it was done.
            found = client.search_runs(
                [state.experiment_id], f"tags.`nbdist.key` = '{begin.key}'", max_results=1
            )
            if found:
                state.run_id = found[0].info.run_id
                return
        state.creating = True
        run.save(state)
        created = client.create_run(
            state.experiment_id,
            start_time=begin.time_ms,
            tags={**begin.tags, "nbdist.key": begin.key},
            run_name=begin.name,
        )
        state.run_id, state.creating = created.info.run_id, False

    def _send_chunk(self, run: SpooledRun, state: State, client: Any, chunk: Chunk) -> None:
        if chunk.end is not None:
            self._end(state, client, chunk.end)
        elif chunk.file:
            self._send_file(run, state, client, chunk.file)
        else:
            self._send_values(run, state, client, chunk)

    def _send_values(self, run: SpooledRun, state: State, client: Any, chunk: Chunk) -> None:
        from mlflow.entities import Metric, Param, RunTag

        metrics = [
            Metric(key, value, point.time_ms, point.step + state.first_step)
            for point in chunk.points
            for key, value in point.values.items()
        ]
        params, tags = chunk.params, dict(chunk.tags)
        begin = run.begin()
        if params and begin and (begin.continues or begin.resume):
            # A param never changes; what this cell had different becomes a tag.
            known = _calling(lambda: client.get_run(state.run_id)).data.params
            for key in [k for k in params if k in known]:
                if known[key] != params[key]:
                    tags[f"nbdist.resumed.{key}"] = params[key]
                del params[key]
        entries: list[Any] = [*metrics]
        entries += [Param(k, v) for k, v in params.items()]
        entries += [RunTag(k, v) for k, v in tags.items()]
        # One row may hold more than MLflow takes at once.
        for start in range(0, len(entries), MOST_POINTS):
            self._send_entries(state, client, entries[start : start + MOST_POINTS])

    def _send_entries(self, state: State, client: Any, entries: Sequence[Any]) -> None:
        """Send metrics, params and tags; halve what is refused until the culprits stand alone."""
        from mlflow.entities import Metric, Param, RunTag

        def of(kind: type) -> list[Any]:
            return [e for e in entries if isinstance(e, kind)]

        metrics = of(Metric)
        try:
            _calling(
                lambda: client.log_batch(
                    state.run_id, metrics=metrics, params=of(Param), tags=of(RunTag)
                )
            )
        except _NotTaken as error:
            if not error.is_final:
                raise
            run = _calling(lambda: client.get_run(state.run_id))
            if run.info.lifecycle_stage == "deleted":
                raise _Deleted from error
            if len(entries) == 1:
                state.refused += 1
                state.why_refused = str(error)
                _log.warning("MLflow refused %s: %s", entries[0].key, error)
                return
            middle = len(entries) // 2
            self._send_entries(state, client, entries[:middle])
            self._send_entries(state, client, entries[middle:])
            return
        state.sent += len(metrics)
        self.sent += len(metrics)

    def _send_file(self, run: SpooledRun, state: State, client: Any, name: str) -> None:
        path = run.folder / "files" / name
        if not path.exists():
            return  # removed by hand; the rest of the run still counts
        try:
            client.log_artifact(state.run_id, str(path))
        except Exception as error:
            # Artifacts may live elsewhere than runs, behind another key or package. A server
            # that is gone is waited for; a store that fails alone must not hold up the run.
            _calling(lambda: client.get_run(state.run_id))
            key = (run.key, name)
            self._artifact_failures[key] = self._artifact_failures.get(key, 0) + 1
            if self._artifact_failures[key] < _ARTIFACT_ATTEMPTS:
                raise _NotTaken(f"artifact {name}: {_text(error)}") from error
            state.refused += 1
            state.why_refused = f"artifact {name}: {_text(error)}"
            _log.warning("run %s goes on without %s: %s", run.key, name, _text(error))

    def _end(self, state: State, client: Any, end: dict[str, Any]) -> None:
        _calling(lambda: client.set_terminated(state.run_id, end["status"], end["time_ms"]))
        state.is_done = True

    def _update_view(self, begin: Begin, state: State, server: _Server) -> None:
        """Prepare the charts the UI opens with; they are a comfort and never hold up a run."""
        summaries = [run.summary() for run in spooled_runs(self._folder)]
        value = view.encode(
            view.view_state([s for s in summaries if s.get("experiment") == begin.experiment])
        )
        if server.views.get(state.experiment_id) == value:
            return
        server.views[state.experiment_id] = value
        if len(value) > view.MOST_CHARACTERS:
            return
        client = self._client(server)
        try:
            client.set_experiment_tag(state.experiment_id, view.TAG, value)
        except Exception as error:
            _log.warning("the prepared view was not stored: %s", _text(error))


def _experiment_id(client: Any, begin: Begin) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(begin.experiment)
    if found is None:
        try:
            return str(client.create_experiment(begin.experiment, begin.artifacts))
        except MlflowException:
            # Someone else may have been quicker.
            found = client.get_experiment_by_name(begin.experiment)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        raise _NotTaken(
            f"the experiment {begin.experiment!r} is deleted; restore it with "
            f"`mlflow experiments restore --experiment-id {found.experiment_id}`"
        )
    return str(found.experiment_id)


def _newest_of_name(client: Any, state: State, name: str) -> tuple[str, int]:
    """Return id and last step of the newest MLflow run called `name`; ("", 0) if there is none."""
    quoted = name.replace("'", "\\'")
    found = client.search_runs(
        [state.experiment_id],
        f"attributes.run_name = '{quoted}'",
        order_by=["attributes.start_time DESC"],
        max_results=1,
    )
    if not found:
        return "", 0
    run = found[0]
    key = next((k for k in ("loss", "step_s", *run.data.metrics) if k in run.data.metrics), None)
    history = client.get_metric_history(run.info.run_id, key) if key else []
    return run.info.run_id, max((point.step for point in history), default=0)


def _calling(call: Callable[[], T]) -> T:
    """Return `call()`; whatever goes wrong in MLflow becomes `_NotTaken`.

    There is no end to what a network, a database or a plug-in may raise, and none of it may end
    this process: all of it means that the run waits.
    """
    from mlflow.exceptions import MlflowException

    try:
        return call()
    except (_NotTaken, _Deleted):
        raise
    except Exception as error:
        status = error.get_http_status_code() if isinstance(error, MlflowException) else 0  # type: ignore[no-untyped-call]
        is_final = status in _NEVER
        raise _NotTaken(_text(error), is_final) from error


def _text(error: BaseException) -> str:
    """Return one line for people, without passwords."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return hide_secrets(f"{type(error).__name__}: {line}")[:300]


def _follow(folder: Path, kernel_pid: int) -> None:
    """Send what the kernel spools until it closes our input, or dies, or has long been quiet."""
    closing = threading.Event()

    def listen() -> None:
        # The one thing the kernel may write is how many seconds it grants us at its end.
        granted = sys.stdin.readline().strip()
        closing.set()
        time.sleep(float(granted) if granted else AFTER_KERNEL_S)
        # Not sys.exit: the main thread may be in a call that waits for a dead server.
        os._exit(0)

    threading.Thread(target=listen, name="nbdist-tracking-input", daemon=True).start()
    shipper = Shipper(folder, kernel_pid)
    quiet_since = time.monotonic()
    while True:
        is_last = closing.is_set()
        if is_last or os.getppid() != kernel_pid:
            # Once more without patience: the server may just have come back.
            shipper.round(patient=False)
            return
        if shipper.round():
            quiet_since = time.monotonic()
        elif time.monotonic() - quiet_since > IDLE_S:
            return
        closing.wait(PERIOD_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the shipping process; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m nbdist.client.tracking.ship")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernel", type=int, default=0, help="follow this kernel's runs")
    parser.add_argument("--drain", action="store_true", help="send what is there, then end")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    os.nice(5)  # training comes first
    os.umask(0o077)  # the database and its artifacts are for their owner
    if options.drain:
        shipper = Shipper(options.folder, 0)
        with contextlib.redirect_stdout(sys.stderr):  # MLflow prints links to its runs
            shipper.round(patient=False)
        print(json.dumps({"sent": shipper.sent}))
    else:
        _follow(options.folder, options.kernel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
