"""Trainings as a board sees them: real Telemetry, filled with numbers made from a seed."""

import math
import random

from nbdist.client.metrics.analysis.values import (
    Analysis,
    CollectiveRow,
    RankStep,
    Span,
    Straggler,
    TimeLine,
    TimelineLane,
)
from nbdist.client.metrics.telemetry import CellInfo, Telemetry
from nbdist.shared.wire import Batch, Record


def cell_info(ranks: int, device: str = "cpu") -> CellInfo:
    """Return a cell that runs on `ranks` ranks."""
    return CellInfo(
        number=7,
        source="for x, y in loader: ...",
        ranks=tuple(range(ranks)),
        world_size=ranks,
        backend="gloo",
        devices=tuple(device for _ in range(ranks)),
    )


def steps_of(
    rank: int,
    ranks: int,
    steps: int,
    *,
    first: int = 1,
    total: int | None = None,
    seed: int = 0,
    began: int = 0,
) -> Batch:
    """Return the step records of one rank: a falling loss, noisy times, a slow first step."""
    draw = random.Random(seed * 1000 + rank * 7 + first)
    records = []
    for step in range(first, first + steps):
        compute = 9e-3 * (1 + 0.06 * draw.gauss(0, 1))
        wait = 2.5e-3 * (1 + 0.25 * abs(draw.gauss(0, 1)))
        if draw.random() < 0.004:
            wait += 9e-3
        if step == 1:
            wait += 0.45
        data = 0.8e-3 * (1 + 0.3 * abs(draw.gauss(0, 1)))
        base = 0.12 + 2.2 * math.exp(-step / 170) + 0.25 * math.exp(-step / 30)
        values = {
            "loss": base * (1 + 0.1 * draw.gauss(0, 1)),
            "compute_s": compute,
            "comm_s": wait,
            "data_s": data,
            "step_s": compute + wait + data,
            "samples": 32.0,
            "rss_bytes": 6.1e8 + 1e6 * rank,
        }
        if total is not None:
            values |= {"total": float(total)} | ({"epoch_began": float(began)} if began else {})
        records.append(Record(rank, step - 1, "step", step, step * 10**7, values))
    return Batch(rank, tuple(records))


def training(ranks: int = 2, steps: int = 1000, *, total: int | None = None) -> Telemetry:
    """Return the telemetry of a cell in which all ranks made `steps` steps."""
    telemetry = Telemetry()
    for rank in range(ranks):
        telemetry.receive(steps_of(rank, ranks, steps, total=total))
    return telemetry


def devices_of(rank: int, seconds: int, *, gpu: bool, first_seq: int = 10**6) -> Batch:
    """Return what a rank tells of its process and its device each second; rank 1's GPU idles."""
    draw, records = random.Random(rank), []
    for second in range(seconds):
        values = {"cpu_pct": 97 + 3 * draw.random(), "resident_bytes": 6e8 + 2e6 * second}
        if gpu:
            use = 12.0 if rank == 1 else 92.0
            values |= {
                "device_pct": use + 6 * draw.random(),
                "device_bytes": min(61e9, 2e9 * (second + 1)),
                "allocated_bytes": min(50e9, 2e9 * second),
                "reserved_bytes": min(55e9, 2e9 * second),
                "peak_bytes": min(50e9, 2e9 * second),
                "device_total_bytes": 80e9,
                "device_c": 35 + use / 3 * (1 - math.exp(-second / 30)),
                "device_w": 90 + 5 * use,
            }
        moment_ns = 1_700_000_000 * 10**9 + second * 10**9
        records.append(Record(rank, first_seq + second, "device", second, moment_ns, values))
    return Batch(rank, tuple(records))


def analysis_of(
    ranks: int = 4, steps: int = 60, *, slow: int | None = None, buckets: int = 3
) -> Analysis:
    """Return what is known of such a training: each step sends `buckets` of gradients.

    All ranks launch a bucket while backward goes on, and wait at its end for the last; with a
    slow rank this is always the same, and there is a verdict.
    """
    draw = random.Random(ranks * 31 + buckets)
    late = [0.6 * draw.random() for _ in range(ranks)]
    if slow is not None:
        late[slow] = 5.0
    rows = tuple(
        CollectiveRow(
            "all_reduce", "group dp" if ranks > 2 else "", tuple(range(ranks)), "cell 7, line 3",
            "float32", 25_000_000 >> i, 1.0, max(late) - min(late), 2.1 / (i + 1), 0.2, 1.4,
            (late.index(max(late)), 0.84 if slow is not None else 0.4), 4.1e9, 6.2e9 / (i + 1),
        )
        for i in range(buckets)
    )  # fmt: skip
    lanes = tuple(_lane(rank, late, buckets, draw) for rank in range(ranks))
    told = tuple(
        RankStep(
            rank,
            15.0,
            _parts(rank, late),
            None
            if late[rank] == max(late)
            else (late.index(max(late)), 0.9 * (max(late) - late[rank])),
        )
        for rank in range(ranks)
    )
    line = TimeLine(
        48.0, tuple((steps - 2 + i, 16.0 * i, 16.0 * i + 15.8) for i in range(3)), lanes
    )
    verdicts: tuple[Straggler, ...] = ()
    if slow is not None:
        words = f"rank {slow} is 48 % slower: its data loading (5.6 ms against 0.8 ms a step)."
        verdicts = (Straggler(slow, "data", 0.48, words, steps - 49),)
    return Analysis(told, rows if ranks > 1 else (), line if ranks > 1 else None, verdicts, 0.02,
                    steps, 0)  # fmt: skip


def _parts(rank: int, late: list[float]) -> dict[str, float]:
    waiting = max(late) - late[rank]
    data = 0.8 + (late[rank] if late[rank] > 1 else 0.0)
    compute = 15.0 - waiting - data - 2.0 - 1.9 - 0.6 - 0.3
    return {
        "compute": compute, "hidden": 2.0, "transfer": 1.9, "waiting": waiting, "data": data,
        "optimizer": 0.6, "other": 0.3,
    }  # fmt: skip


def _lane(rank: int, late: list[float], buckets: int, draw: random.Random) -> TimelineLane:
    spans, blocked = [], []
    for step in range(3):
        begin = 16.0 * step
        for bucket in range(buckets):
            base = begin + 5.0 + 2.0 * bucket
            launch = base + late[rank]
            arrived = base + max(late)
            start = launch + 0.2 + 0.1 * draw.random()
            end = arrived + 1.6 + 0.8 * draw.random()
            spans.append(Span(bucket, launch, start, end, arrived))
        blocked.append((begin + 5.4 + 2.0 * (buckets - 1) + late[rank], end))
    return TimelineLane(rank, tuple(spans), tuple(blocked))
