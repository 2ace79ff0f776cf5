"""The same steps seen by the tap and by torch.profiler, on real gloo groups.

gloo's own events are the reference: each begins when a worker takes an operation up and ends when
it is over, or of a message from its call to the end of the wait for it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from nbdist.engine.tap import sampling
from nbdist.engine.tap.intervals import union
from nbdist.engine.tap.sampling import StepSampling
from nbdist.shared.packed import CALL

STEPS = 30
WORKERS = 8
FLOAT = 4  # bytes


class EveryStep(StepSampling):
    """Samples all steps, however short they are."""

    def sampled(self, now_ns: int, rows: int) -> None:
        """Leave the stride as it is."""


def tell_every_step() -> None:
    """Have every step of this cell measured, and its collectives sampled."""
    from nbdist.engine.tap import in_flight

    in_flight.state.stride = EveryStep()
    sampling.MOST_MEASURED = math.inf


@dataclass
class Seen:
    """What one of the two saw of each step: union of intervals in ms, operations, bytes put in."""

    ms: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        """Return the median step's."""
        return median(self.ms)


def compare(kind: str) -> tuple[Seen, Seen]:
    """Return what the tap and the profiler saw of `STEPS` steps of a layout."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, record_function

    from nbdist.engine.tap import tap

    go_first()
    more_workers()
    torch.manual_seed(0)
    tap.install("full")
    step = {"ddp": _ddp, "fsdp": _fsdp, "tp": _tp, "pipeline": _pipeline}[kind]()
    for _ in range(3):
        step()
    ours = Seen()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        step()
        tap.begin_cell()
        tell_every_step()
        tap.take()
        for number in range(1, STEPS + 1):
            with record_function("a step"):
                step()
            traffic = tap.take(number)
            assert traffic.calls is not None
            assert traffic.total_ns is not None
            ours.ms.append(traffic.total_ns / 1e6)
            ours.counts.append(len(traffic.calls.calls) // len(CALL))
            ours.bytes.append(traffic.bytes)
    dist.barrier()
    return ours, _by_step(recorded.events())


def _by_step(events: Any) -> Seen:
    theirs = Seen()
    steps = sorted((e.time_range.start, e.time_range.end) for e in events if e.name == "a step")
    operations = [e for e in events if e.name.startswith("gloo:")]
    for since, until in steps:
        mine = [e for e in operations if since <= e.time_range.start < until]
        spans = [(int(e.time_range.start * 1e3), int(e.time_range.end * 1e3)) for e in mine]
        sent = [e for e in mine if e.name != "gloo:recv"]
        theirs.ms.append(union(spans) / 1e6)
        theirs.counts.append(len(mine))
        theirs.bytes.append(sum(FLOAT * math.prod(shape) for e in sent for shape in e.input_shapes))
    return theirs


def go_first() -> None:
    """Let this rank go before other processes, where allowed: threads that wake then run at once.

    On Linux threads that are made later inherit it, gloo's among them.
    """
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)


def more_workers() -> None:
    """Put a backend with more workers than operations are ever in flight into the group."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    options._threads = WORKERS
    options._timeout = timedelta(seconds=60)
    world = dist.group.WORLD
    assert world is not None
    store = dist.PrefixStore("workers", dist.distributed_c10d._get_default_store())
    backend = dist.ProcessGroupGloo(store, dist.get_rank(), dist.get_world_size(), options)
    slot = dist.ProcessGroup.BackendType(12)  # one that nothing uses
    world._register_backend(torch.device("cpu"), slot, backend)


def _layers(count: int, width: int) -> Any:
    from torch import nn

    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def _training(model: Any, rows: int, width: int) -> Callable[[], None]:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    x = torch.ones(rows, width)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _ddp() -> Callable[[], None]:
    from torch.nn.parallel import DistributedDataParallel

    return _training(DistributedDataParallel(_layers(4, 1536), bucket_cap_mb=5), 32, 1536)


def _fsdp() -> Callable[[], None]:
    from torch.distributed.fsdp import fully_shard

    model = _layers(2, 1536)
    for layer in model:
        fully_shard(layer)
    return _training(fully_shard(model), 32, 1536)


def _tp() -> Callable[[], None]:
    from torch.distributed import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    plan |= {"2": ColwiseParallel(), "3": RowwiseParallel()}
    return _training(parallelize_module(_layers(4, 512), mesh, plan), 4096, 512)


def _pipeline() -> Callable[[], None]:
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, width = dist.get_rank(), 256
    part = _layers(2, width)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, 4, loss_fn=lambda output, target: (output - target).square().mean()
    )
    optimizer = torch.optim.SGD(part.parameters(), lr=0.001)
    x = torch.ones(8192, width)

    def step() -> None:
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x)
        optimizer.step()
        optimizer.zero_grad()

    return step
