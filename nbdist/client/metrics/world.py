"""What was measured on some ranks, as the plain value that scaling and forecasts are made of."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from nbdist.client.metrics.analysis.values import LEFT_OUT, Analysis, CollectiveRow
from nbdist.shared.packed import Template
from nbdist.shared.wire import Record, is_measured
from nbdist.study.scaling import Call, World
from nbdist.study.step_time import StepTime

_MS = 1e-3


class OneClock:
    """The clock of ranks on one machine: all read the same."""

    error_ns = 0

    def offset_ns(self, rank: int, moment_ns: int) -> int:
        """Return what to add to a rank's moment: nothing."""
        return 0


def world_of_records(
    records: Mapping[int, Sequence[Record]], *, cores: int, backend: str, latency_s: float
) -> World | None:
    """Return what ranks of one machine have recorded of their steps, the first `LEFT_OUT` aside.

    Args:
        records: Of each rank, in order.
        cores: As in `World`.
        backend: gloo or nccl.
        latency_s: As in `World`.

    Returns:
        None where a rank made no step behind these.
    """
    from nbdist.client.metrics.analysis.analyst import Analyst  # numpy: only where it is needed

    analyst = Analyst(sorted(records), OneClock())
    late = [record for of_rank in records.values() for record in _behind(of_rank)]
    analyst.take(late, is_last=True)
    steps = {
        rank: [one.values for one in late if one.rank == rank and _is_step(one)] for rank in records
    }
    if not all(steps.values()):
        return None
    world = world_of(analyst.analysis(), steps, backend=backend)
    return None if world is None else replace(world, cores=cores, latency_s=latency_s)


def _is_step(record: Record) -> bool:
    return record.kind == "step" and is_measured(record.values) and "step_s" in record.values


def _behind(records: Sequence[Record]) -> list[Record]:
    """Return the records of later steps; what earlier ones have told of templates moves there."""
    templates: dict[int, Template] = {}
    late = []
    for record in records:
        if record.detail is not None:
            templates |= record.detail.new
            record = replace(record, detail=replace(record.detail, new=dict(templates)))
        if record.step > LEFT_OUT and record.kind in ("step", "calls"):
            late.append(record)
    return late


def world_of(
    analysis: Analysis, steps: Mapping[int, Sequence[Mapping[str, float]]], *, backend: str
) -> World | None:
    """Return what an analysis tells of the usual step, beside the steps' own values.

    Args:
        analysis: Of these steps.
        steps: Values of records (`wire.Record`) of each rank.
        backend: gloo or nccl.

    Returns:
        None where nothing was explained.
    """
    if not analysis.ranks or not any(steps.values()):
        return None
    parts: dict[str, float] = {}
    for rank in analysis.ranks:
        for part, ms in rank.parts.items():
            parts[part] = parts.get(part, 0.0) + ms * _MS / len(analysis.ranks)
    n = len(steps)
    lengths = [values["step_s"] for of_rank in steps.values() for values in of_rank]
    return World(
        n,
        StepTime(
            sum(parts.get(part, 0.0) for part in ("compute", "hidden", "optimizer")),
            parts.get("transfer", 0.0),
            parts.get("hidden", 0.0),
            loader_s=parts.get("data", 0.0),
            skew_s=parts.get("waiting", 0.0),
            serial_s=parts.get("other", 0.0),
        ),
        spread_s=statistics.pstdev(lengths),
        steps=len(lengths) // n,
        samples=sum(_mean(of_rank, "samples") for of_rank in steps.values()),
        calls=tuple(_call(row, n) for row in analysis.table if row.kind != "recv"),
        starved_s=sum(_mean(of_rank, "starved_s") for of_rank in steps.values()) / n,
        own_s=tuple(
            (one.step_ms - one.parts.get("transfer", 0.0) - one.parts.get("waiting", 0.0)) * _MS
            for one in analysis.ranks
        ),
        backend=backend,
    )


def _call(row: CollectiveRow, n: int) -> Call:
    """Return a row of the table as one of n ranks launches it, in the mean of them."""
    by = 1 if row.kind == "send" else len(row.ranks)
    transfer_s = None if row.transfer_ms is None else row.transfer_ms * _MS
    return Call(row.kind, row.bytes, len(row.ranks), row.count * by / n, transfer_s, row.dtype)


def _mean(of_rank: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.fmean(values.get(name, 0.0) for values in of_rank) if of_rank else 0.0
