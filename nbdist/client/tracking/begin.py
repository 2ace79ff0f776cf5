"""Decide what a run is when it begins: its name, its tags, and which run it goes on with.

Threads: everything here runs on a run's own thread; it reads the spool and asks git.
"""

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbdist.client.metrics.telemetry import CellInfo
from nbdist.client.tracking import provenance
from nbdist.client.tracking.names import asked_name, params_of, run_name
from nbdist.client.tracking.settings import own_artifacts
from nbdist.client.tracking.spool import Begin, SpooledRun, spool_of, spooled_runs

TAG_FACTS = ("torch", "cuda", "nccl", "host", "proof")
# matplotlib's petroff8, which people with colour blindness can tell apart (arXiv:2107.02270).
_COLORS = ("#1845fb", "#ff5e02", "#c91f16", "#c849a9", "#adad7d", "#86c8dd", "#578dff", "#656364")


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Where the runs of one notebook go: `uri` holds no password."""

    folder: Path
    uri: str
    experiment: str


def new_key(number: int) -> str:
    """Return a key for a run of cell `number`; keys sort by time and name their kernel."""
    return f"{time.time_ns():020d}-{os.getpid()}-{number}"


def name_of(info: CellInfo, facts: Mapping[str, str]) -> str:
    """Return the run's name: the one asked for, else what differs from other runs."""
    model, layout = facts.get("model", ""), facts.get("layout", "")
    return asked_name(info.run_name or run_name(model, layout, len(info.ranks), info.params))


def continued(
    place: RunPlace, info: CellInfo, facts: Mapping[str, str], *, keeps_training: bool = False
) -> SpooledRun | None:
    """Return the run of this folder that the cell goes on with, if it goes on with any.

    That is the run that a failed attempt at the same cell has begun, where this one keeps what
    that had trained, or with `--resume` the newest of the cell's name. A newer one that only
    the server knows is found when the run is sent.
    """
    failed = failed_attempt(place, info)
    if failed is not None and (keeps_training or info.resume or info.attached):
        return failed
    if not info.resume:
        return None
    wanted = {"name": name_of(info, facts), "experiment": place.experiment, "uri": place.uri}
    for run in spooled_runs(place.folder):
        summary = run.summary()
        if summary.get("kind") != "study" and wanted.items() <= summary.items():
            return run
    return None


def failed_attempt(place: RunPlace, info: CellInfo) -> SpooledRun | None:
    """Return the run of the failed attempt that the cell repeats; None where there is none."""
    if info.continues is None:
        return None
    run = SpooledRun(spool_of(place.folder) / info.continues)
    return run if run.summary() else None


def attached_run(folder: Path, number: int, kernels: Collection[int], since_s: float) -> str | None:
    """Return the key of the run of a cell that goes on in this kernel; None where none had begun.

    Args:
        folder: The private folder that has its runs.
        number: The cell's.
        kernels: The pids of those that had the cell.
        since_s: When the cell began, in seconds since 1970.
    """
    ends = {f"{pid}-{number}" for pid in kernels}
    for run in spooled_runs(folder):
        began_ns, _, end = run.key.partition("-")
        if int(began_ns) < since_s * 1e9:
            return None
        if end in ends:
            return run.key
    return None


def steps_again(earlier: Mapping[str, Any], trained_before: int | None) -> int:
    """Return how many steps of a run are made again by what goes on with it from a checkpoint.

    Args:
        earlier: The summary of that run.
        trained_before: Steps that the training had made where it goes on; None: not known.
    """
    began = earlier.get("trained_before")
    if began is None or trained_before is None:
        return 0
    made = earlier["last_step"] - earlier["first_step"]
    again = made - (trained_before - began)
    # Others than one a step of the run: several optimizers, each with steps of its own.
    return again if 0 <= again <= made else 0


def make_begin(
    place: RunPlace,
    info: CellInfo,
    facts: Mapping[str, str],
    before: SpooledRun | None,
    time_ms: int,
    again: int = 0,
) -> Begin:
    """Return the run's first operation.

    Args:
        place: Where it goes.
        info: The cell.
        facts: What is known of the ranks so far.
        before: The run it goes on with.
        time_ms: The wall clock of its first record.
        again: Steps of that run which this one makes again.
    """
    tags = _first_tags(place, info, facts)
    earlier = before.summary() if before else {}
    last = int(earlier.get("first_step" if info.attached else "last_step", 0))
    failed = failed_attempt(place, info)
    attempt = int(failed.summary().get("attempt", 1)) + (not info.attached) if failed else 1
    if attempt > 1:
        tags["nbdist.attempt"] = str(attempt)
    return Begin(
        key=new_key(info.number),
        uri=place.uri,
        experiment=place.experiment,
        name=name_of(info, facts),
        time_ms=int(earlier.get("started_ms", time_ms)),
        artifacts=own_artifacts(place.folder, place.uri, place.experiment),
        continues=before.key if before else None,
        resume=info.resume and not info.attached,
        first_step=last - again,
        study=info.study,
        starts_over=failed.key if failed and not before else None,
        attempt=attempt,
        tags=tags,
    )


def _first_tags(place: RunPlace, info: CellInfo, facts: Mapping[str, str]) -> dict[str, str]:
    tags = provenance.source_tags(place.experiment, info.number, place.folder.parent)
    tags |= {f"nbdist.{key}": facts[key] for key in TAG_FACTS if key in facts}
    # MLflow draws a run in a colour of its id, and neighbours often come out equal.
    return tags | {"mlflow.runColor": _COLORS[_count(place) % len(_COLORS)]}


def summary_of(begin: Begin, info: CellInfo, status: str) -> dict[str, Any]:
    """Return what every summary holds: which run it is, and how it stands now.

    The summaries of runs and studies add what came of them.
    """
    return {
        "name": begin.name,
        "experiment": begin.experiment,
        "uri": begin.uri,
        "status": status,
        "cell": info.number,
        "started_ms": begin.time_ms,
        "first_step": begin.first_step,
        # A clock that was set back must not let a run end before it began.
        "updated_ms": max(begin.time_ms, time.time_ns() // 1_000_000),
        "world_size": len(info.ranks),
        "ranks": info.ranks,
        "continues": begin.continues,
        "starts_over": begin.starts_over,
        "attempt": begin.attempt,
        "study": begin.study,
    }


def own_params(info: CellInfo) -> dict[str, str]:
    """Return the params that a run has whatever the ranks tell."""
    own: Mapping[str, Any] = {
        "world_size": len(info.ranks),
        "backend": info.backend,
        "devices": ", ".join(dict.fromkeys(info.devices)),
    }
    return params_of(own) | params_of(info.params)


def _count(place: RunPlace) -> int:
    """Return how many lines the charts have by now; studies have none."""
    return sum(run.summary().get("kind") != "study" for run in spooled_runs(place.folder))
