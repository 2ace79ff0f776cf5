"""Trainings as a board sees them: real Telemetry, filled with numbers made from a seed."""

import math
import random

from nbdist.client.telemetry import Telemetry
from nbdist.wire import Batch, CellInfo, Record


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
    rank: int, ranks: int, steps: int, *, first: int = 1, total: int | None = None,
    straggler: int | None = None, seed: int = 0,
) -> Batch:  # fmt: skip
    """Return the step records of one rank: a falling loss, noisy times, a slow first step.

    The straggler computes 40 % longer than the others, so that they wait for it and it does not.
    """
    draw = random.Random(seed * 1000 + rank * 7 + first)
    records = []
    for step in range(first, first + steps):
        compute = 9e-3 * (1 + 0.06 * draw.gauss(0, 1))
        wait = 2.5e-3 * (1 + 0.25 * abs(draw.gauss(0, 1)))
        if straggler is not None:
            wait += 0.0 if rank == straggler else 3.6e-3
            compute *= 1.4 if rank == straggler else 1.0
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
        }
        if total is not None:
            values["total"] = float(total)
        records.append(Record(rank, step - 1, "step", step, step * 10**7, values))
    return Batch(rank, tuple(records))


def training(
    ranks: int = 2, steps: int = 1000, *, total: int | None = None, straggler: int | None = None
) -> Telemetry:
    """Return the telemetry of a cell in which all ranks made `steps` steps."""
    telemetry = Telemetry()
    for rank in range(ranks):
        telemetry.receive(steps_of(rank, ranks, steps, total=total, straggler=straggler))
    return telemetry
