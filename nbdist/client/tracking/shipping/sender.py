"""Put one spooled run into MLflow: create it, send its entries, end it.

Runs in the shipping process (`ship`), the only place that imports mlflow.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nbdist.client.tracking.hiding import hide_secrets
from nbdist.client.tracking.series import Point
from nbdist.client.tracking.shipping import description, models
from nbdist.client.tracking.spool import (
    CONTINUED_UNSENT,
    STUDY_UNSENT,
    Begin,
    Entry,
    SpooledRun,
    SpoolState,
)

_ARTIFACT_ATTEMPTS = 3
# 400 and 409: this entry is wrong or already there; 413 and 422: too large, not understood.
# Everything else (no connection, 401, 404, 429, 5xx) may be different tomorrow.
_NEVER = frozenset({400, 409, 413, 422})
# What MLflow itself says of these is an address and a page of its manual.
_REFUSED = {
    401: (
        "401: unknown user, password or token; MLFLOW_TRACKING_USERNAME and "
        "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, set them"
    ),
    403: "403: this user or token has no permission for that",
}

# How an earlier attempt ended is not how the run stands once it goes on.
_OF_AN_END = frozenset({"nbdist.error", "nbdist.ended"})

T = TypeVar("T")

_log = logging.getLogger("nbdist.tracking")


class NotTaken(Exception):
    """MLflow did not do what was asked; the text says why, `is_final` that it never will."""

    def __init__(self, why: str, is_final: bool = False) -> None:
        super().__init__(why)
        self.is_final = is_final


class Deleted(Exception):
    """Someone has deleted the run in MLflow, and that is their decision."""


class Unknown(NotTaken):
    """MLflow has never heard of the run: its database was deleted, or another took its place."""


def calling(call: Callable[[], T]) -> T:
    """Return `call()`; whatever goes wrong in MLflow becomes `NotTaken`.

    There is no end to what a network, a database or a plug-in may raise, and none of it may end
    this process: all of it means that the run waits.
    """
    from mlflow.exceptions import MlflowException

    try:
        return call()
    except (NotTaken, Deleted):
        raise
    except Exception as error:
        if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
            raise Unknown(error_text(error)) from error
        status = error.get_http_status_code() if isinstance(error, MlflowException) else 0  # type: ignore[no-untyped-call]
        if said := _REFUSED.get(status):
            raise NotTaken(said) from error
        raise NotTaken(error_text(error), status in _NEVER) from error


def error_text(error: BaseException) -> str:
    """Return one line for people, without passwords."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return hide_secrets(f"{type(error).__name__}: {line}")[:300]


@dataclass(frozen=True, slots=True)
class RunSender:
    """Sends one run. Every method may raise `NotTaken`, and `Deleted`.

    `client` is an `MlflowClient`; `state`, how far the run has come, is kept up to date and saved
    by the caller.
    """

    client: Any
    run: SpooledRun
    begin: Begin
    state: SpoolState

    def open(self) -> None:
        """Find or create the MLflow run, unless that was done before."""
        if not self.state.run_id:
            calling(self._find_or_create)
            self.run.save(self.state)

    def send(self, entries: Sequence[Entry]) -> None:
        """Send the entries of one batch."""
        match entries:
            case [{"op": "end", "status": status, "time_ms": time_ms}]:
                self.end(status, time_ms)
            case [{"op": "file", "name": name}]:
                self._attempt(f"artifact {name}", lambda: self._send_file(name))
            case [{"op": "model", "facts": facts}]:
                if _is_left(facts) and self.run.is_owned():
                    raise NotTaken("the kernel still moves its model")
                self._attempt(f"model {facts['name']}", lambda: self._send_model(facts))
            case _:
                self._send_values(entries)

    def end(self, status: str, time_ms: int) -> None:
        """End the MLflow run."""
        try:
            calling(lambda: self.client.set_terminated(self.state.run_id, status, time_ms))
        except NotTaken as error:
            self._raise_if_deleted(error)
            raise
        self.state.is_done = True

    def end_with_kernel(self) -> None:
        """End a run whose kernel died at the time of its last summary."""
        state = self.state
        calling(lambda: self.client.set_tag(state.run_id, "nbdist.ended", "with its kernel"))
        self.end("KILLED", self.run.summary().get("updated_ms", self.begin.time_ms))

    def _find_or_create(self) -> None:
        begin, state, client = self.begin, self.state, self.client
        state.experiment_id = _experiment_id(client, begin)
        if begin.continues:
            before = SpooledRun(self.run.folder.parent / begin.continues)
            known = before.state()
            # One that was removed by hand, or damaged, will never be sent.
            if not known.run_id and before.ops.exists():
                raise NotTaken(CONTINUED_UNSENT)
            state.run_id, state.first_step = known.run_id, known.first_step
        if begin.resume:
            self._resume_newest()
        if state.run_id:
            run = self._known(state.run_id)
            if run is not None and run.info.lifecycle_stage != "deleted":
                client.update_run(state.run_id, status="RUNNING")
                for tag in _OF_AN_END & run.data.tags.keys():
                    client.delete_tag(state.run_id, tag)
                return
            state.run_id = ""
        # From here on: what it continued is gone; it stands on its own.
        if begin.resume:
            state.resumed = "none"
        if state.creating:
            # We asked before and the answer got lost: look whether it was done.
            found = client.search_runs(
                [state.experiment_id], f"tags.`nbdist.key` = '{begin.key}'", max_results=1
            )
            if found:
                state.run_id = found[0].info.run_id
                self._fold_failed()
                return
        state.creating = True
        self.run.save(state)
        created = client.create_run(
            state.experiment_id,
            start_time=begin.time_ms,
            tags={**begin.tags, **self._nesting(), "nbdist.key": begin.key},
            run_name=begin.name,
        )
        state.run_id, state.creating = created.info.run_id, False
        self._fold_failed()

    def _fold_failed(self) -> None:
        """Put the run of the attempt that this one makes again below it, under a name of its own.

        What MLflow has of a run stays: one that begins again from step 1 has to be another.
        """
        if self.begin.starts_over is None:
            return
        failed = SpooledRun(self.run.folder.parent / self.begin.starts_over)
        run_id = failed.state().run_id
        if not run_id or self._known(run_id) is None:
            return
        name = f"{failed.summary()['name']} (attempt {failed.summary().get('attempt', 1)})"
        self.client.update_run(run_id, name=name)
        self.client.set_tag(run_id, "mlflow.parentRunId", self.state.run_id)

    def _nesting(self) -> dict[str, str]:
        """Return the tag that nests the run under its study."""
        if self.begin.study is None:
            return {}
        study = SpooledRun(self.run.folder.parent / self.begin.study)
        run_id = study.state().run_id
        if not run_id:
            if not study.ops.exists():
                return {}  # removed by hand; the run stands on its own
            raise NotTaken(STUDY_UNSENT)
        return {"mlflow.parentRunId": run_id} if self._known(run_id) is not None else {}

    def _known(self, run_id: str) -> Any:
        """Return MLflow's run, None where it has none of that id."""
        try:
            return calling(lambda: self.client.get_run(run_id))
        except Unknown:
            return None

    def _resume_newest(self) -> None:
        """Go on with the newest run of our name that MLflow has, where that is not ours.

        The kernel knew the runs of its own folder alone: of a run of another folder, or of another
        machine, the steps are moved to follow those that are there.
        """
        state, begin = self.state, self.begin
        found = _newest_of_name(self.client, state.experiment_id, begin.name)
        if found is None or found.info.run_id == state.run_id:
            return
        if state.run_id and (known := self._known(state.run_id)) is not None:
            own = known.info
            if own.lifecycle_stage != "deleted" and own.start_time >= found.info.start_time:
                return
        state.run_id, state.resumed = found.info.run_id, "there"
        state.first_step = _last_step(self.client, found) - begin.first_step

    def _send_values(self, entries: Sequence[Entry]) -> None:
        from mlflow.entities import Metric, Param, RunTag

        state = self.state
        metrics: list[Metric] = []
        params: dict[str, str] = {}
        tags: dict[str, str] = {}
        for entry in entries:
            if isinstance(entry, Point):
                step = entry.step + state.first_step
                metrics += [Metric(k, v, entry.time_ms, step) for k, v in entry.values.items()]
            elif entry["op"] == "params":
                params |= entry["values"]
            elif entry["op"] == "tags":
                tags |= entry["values"]
        if description.TAG in tags:
            ids = state.run_id, state.experiment_id
            tags[description.TAG] = description.addressed(tags[description.TAG], *ids)
        if params and (self.begin.continues or self.begin.resume):
            # A param never changes; what this cell had different becomes a tag.
            known = calling(lambda: self.client.get_run(state.run_id)).data.params
            for key in params.keys() & known.keys():
                value = params.pop(key)
                if value != known[key]:
                    tags[f"nbdist.resumed.{key}"] = value
        logged: list[Any] = [*metrics, *(Param(*item) for item in params.items())]
        self._log([*logged, *(RunTag(*item) for item in tags.items())])

    def _log(self, entities: Sequence[Any]) -> None:
        """Log metrics, params and tags; halve what is refused until the culprits stand alone."""
        from mlflow.entities import Metric, Param, RunTag

        def of(kind: type) -> list[Any]:
            return [entity for entity in entities if isinstance(entity, kind)]

        if not entities:
            return
        state, metrics = self.state, of(Metric)
        try:
            calling(
                lambda: self.client.log_batch(
                    state.run_id, metrics=metrics, params=of(Param), tags=of(RunTag)
                )
            )
        except NotTaken as error:
            if not error.is_final:
                raise
            self._raise_if_deleted(error)
            if len(entities) == 1:
                state.refused += 1
                _log.warning("MLflow refused %s: %s", entities[0].key, error)
                return
            middle = len(entities) // 2
            self._log(entities[:middle])
            self._log(entities[middle:])
            return
        state.sent += len(metrics)

    def _send_file(self, name: str) -> None:
        state, path = self.state, self.run.folder / "files" / name
        if path.exists():  # else removed by hand; the rest of the run still counts
            self.client.log_artifact(state.run_id, str(path), name.rpartition("/")[0] or None)

    def _send_model(self, facts: Mapping[str, Any]) -> None:
        """Log a model that a rank has published, register it, and give it its alias."""
        if _is_left(facts):  # by a kernel that was killed; the one that goes on takes it
            _log.warning("run %s goes on without model %s", self.run.key, facts["name"])
            return
        folder = self.run.folder / "files" / facts["folder"]
        if folder.exists():
            models.publish(self.client, self.state.run_id, folder, facts)

    def _attempt(self, what: str, send: Callable[[], None]) -> None:
        """Send what lies in files; give it up after some attempts, but not for a dead server."""
        state = self.state
        try:
            send()
        except Exception as error:
            # Artifacts may live elsewhere than runs, behind another key or package. A server
            # that is gone is waited for; a store that fails alone must not hold up the run.
            calling(lambda: self.client.get_run(state.run_id))
            why = f"{what}: {error_text(error)}"
            state.attempts += 1
            if state.attempts < _ARTIFACT_ATTEMPTS:
                raise NotTaken(why) from error
            state.refused += 1
            _log.warning("run %s goes on without %s", self.run.key, why)
        state.attempts = 0

    def _raise_if_deleted(self, error: NotTaken) -> None:
        run = calling(lambda: self.client.get_run(self.state.run_id))
        if run.info.lifecycle_stage == "deleted":
            raise Deleted from error


def _is_left(facts: Mapping[str, Any]) -> bool:
    """Return whether a model is still where the rank has left it, or parts of it are."""
    return "left_at" in facts and Path(facts["left_at"]).exists()


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
        raise NotTaken(
            f"the experiment {begin.experiment!r} is deleted; restore it with "
            f"`mlflow experiments restore --experiment-id {found.experiment_id}`"
        )
    return str(found.experiment_id)


def _newest_of_name(client: Any, experiment_id: str, name: str) -> Any:
    """Return the newest MLflow run called `name` that is no study; None if there is none."""
    # MLflow knows two quotes and no escapes: a name with both is looked for among the newest.
    quote = next((quote for quote in "'\"" if quote not in name), "")
    found = client.search_runs(
        [experiment_id],
        f"attributes.run_name = {quote}{name}{quote}" if quote else "",
        order_by=["attributes.start_time DESC"],
        max_results=20 if quote else 1000,
    )
    return next(
        (
            run
            for run in found
            if run.info.run_name == name and run.data.tags.get("nbdist.kind") != "study"
        ),
        None,
    )


def _last_step(client: Any, run: Any) -> int:
    """Return the last step of an MLflow run; 0 when it has none."""
    key = next((k for k in ("loss", "step_ms", *run.data.metrics) if k in run.data.metrics), None)
    history = client.get_metric_history(run.info.run_id, key) if key else []
    return max((point.step for point in history), default=0)
