"""What was measured on some ranks, as the plain value that scaling and forecasts are made of."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from nbdist.client.metrics.analysis.values import LEFT_OUT, Analysis, CollectiveRow
from nbdist.shared.wire import EMULATED, Record, is_measured
from nbdist.study.debt import share_kept
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
    told = [r for of_rank in records.values() for r in of_rank if r.kind in ("step", "calls")]
    analyst.take(told, is_last=True)
    steps = {rank: [r.values for r in of if _is_later_step(r)] for rank, of in records.items()}
    if not all(steps.values()):
        return None
    world = world_of(analyst.analysis(), steps, backend=backend)
    if world is None:
        return None
    owed = [r.values for of in records.values() for r in of if r.kind == EMULATED]
    late = [1 - share_kept(of_rank["virtual_s"], of_rank["late_s"]) for of_rank in owed]
    if late:  # virtual devices make up for waits for cores, as far as they can
        world = replace(world, starved_s=max(late) * world.step_s)
    return replace(world, cores=cores, latency_s=latency_s)


def _is_later_step(record: Record) -> bool:
    is_step = record.kind == "step" and "step_s" in record.values
    return is_step and record.step > LEFT_OUT and is_measured(record.values)


def world_of(
    analysis: Analysis, steps: Mapping[int, Sequence[Mapping[str, float]]], *, backend: str
) -> World | None:
    """Return what an analysis tells of the usual step, beside the steps' own values.

    Args:
        analysis: Of a cell that is over; its first steps are left out.
        steps: Values of records (`wire.Record`) of each rank.
        backend: gloo or nccl.

    Returns:
        None where nothing was explained.
    """
    ranks = analysis.later_ranks
    if not ranks or not any(steps.values()):
        return None
    parts: dict[str, float] = {}
    for rank in ranks:
        for part, ms in rank.parts.items():
            parts[part] = parts.get(part, 0.0) + ms * _MS / len(ranks)
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
        calls=tuple(_call(row, n) for row in analysis.later_table if row.kind != "recv"),
        starved_s=sum(_mean(of_rank, "starved_s") for of_rank in steps.values()) / n,
        own_s=tuple(
            (one.step_ms - one.parts.get("transfer", 0.0) - one.parts.get("waiting", 0.0)) * _MS
            for one in ranks
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
