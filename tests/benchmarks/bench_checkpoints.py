"""What a checkpoint costs: how long training stands still, and how fast it reaches the disk.

Four real ranks save a sharded model and its AdamW states, 200 MB in all, in turns with plain
`torch.save` of each rank's own part (all ranks at once, synced to the same disk) and with
torch.distributed.checkpoint's own `save`. What training stands still for is what `save` takes and
for which the next optimizer's step waits; how much longer that step takes in all is told beside it.
Its `async_save`, with a gloo group of its own, copies all before it returns (torch's default), or
within a thread that the next optimizer's step waits for.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.table import Row, apart

RANKS, WIDTH, LAYERS, ROUNDS = 4, 1024, 16, 5
BATCH = 64
ASYNC_SAVE = "dcp.async_save"
ASYNC_STAGING = "dcp.async_save that copies in a thread"
BLOCKED_GOAL, TIME_GOAL = 0.10, 1.25  # a save reaches 80 % of what torch.save reaches


def measure(root: str) -> dict[str, list[float]]:
    """Return the seconds of each way to save, a round each; every rank waits for all."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    import nbdist
    from nbdist.engine.checkpoint import save, training_state
    from nbdist.engine.compat import torch_hooks
    from nbdist.engine.layout.parallelize import parallelize
    from nbdist.engine.recovery import recovery

    recovery.install()
    layers = (nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
    model = parallelize(nn.Sequential(*layers), "zero3").model
    opt = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(BATCH, WIDTH)).sum().backward()
        opt.step()
        opt.zero_grad()

    step()
    rank, folder = dist.get_rank(), Path(root) / "dcp"
    state = training_state.tree(training_state.find(), rank)
    mine: list[Any] = [torch_hooks.local_part(tensor) for tensor in _tensors(state)]
    took: dict[str, list[float]] = {}

    def timed(what: str, do: Callable[[], Any]) -> Any:
        dist.barrier()
        began = time.perf_counter()
        found = do()
        dist.barrier()
        took.setdefault(what, []).append(time.perf_counter() - began)
        return found

    def plain() -> None:
        with open(Path(root) / f"plain-{rank}", "wb") as stream:
            torch.save(mine, stream)
            stream.flush()
            os.fsync(stream.fileno())

    def saved(name: str, **how: Any) -> Any:
        return nbdist.save(str(Path(root) / name), keep=1, **how)

    def save_and_step() -> Any:
        beside = saved("beside")
        step()
        return beside

    own_group = dist.new_group(backend="gloo")
    stagers = {
        way: DefaultStager(StagingOptions(False, False, use_async_staging, False))
        for way, use_async_staging in ((ASYNC_SAVE, False), (ASYNC_STAGING, True))
    }

    def async_save_and_step(way: str) -> Any:
        """Save beside a step whose optimizer waits until all is copied."""
        began = time.perf_counter()
        found = dcp.async_save(
            state, checkpoint_id=str(folder), process_group=own_group, async_stager=stagers[way]
        )
        blocked_s = time.perf_counter() - began
        model(torch.randn(BATCH, WIDTH)).sum().backward()
        began = time.perf_counter()
        if hasattr(found, "staging_completion"):
            found.staging_completion.result()
        took.setdefault(f"{way}, blocked", []).append(blocked_s + time.perf_counter() - began)
        opt.step()
        opt.zero_grad()
        return getattr(found, "upload_completion", found)

    for _ in range(ROUNDS + 1):
        timed("torch.save", plain)
        timed("nbdist.save", lambda: saved("waits", wait=True))
        save.here.settle()  # older ones are deleted
        timed("copied", lambda: saved("copied").wait())
        save.here.settle()
        timed("torch.save again", plain)
        timed("step", step)
        beside = timed("step with a save", save_and_step)
        took.setdefault("blocked", []).append(beside.blocked_s)
        beside.wait()
        timed("dcp.save", lambda: dcp.save(state, checkpoint_id=str(folder)))
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
        for way in stagers:
            timed(way, partial(async_save_and_step, way)).result()
            dist.barrier()
            if rank == 0:
                shutil.rmtree(folder)
    # The first round makes the buffers and the plan, and copies at once.
    return {what: times[1:] for what, times in took.items()}


def _tensors(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [tensor for branch in tree.values() for tensor in _tensors(branch)]
    return [tree]


def rows() -> list[Row]:
    """Return what a save costs training, and its time beside other ways to write the same bytes."""
    from tests.group.engines import cluster

    with tempfile.TemporaryDirectory(dir=".") as root, cluster(RANKS) as ranks:
        took = ranks.run(measure, root)[0]
    middle = {what: statistics.median(times) for what, times in took.items()}
    noise = apart(took["torch.save again"], took["torch.save"])
    save_s, torchs = middle["nbdist.save"], "torch.save of each rank's part"
    return [
        Row(
            "training stands still for a save, 4 ranks, zero3",
            middle["blocked"] * 1e3,
            "ms",
            save_s * 1e3,
            "the same save, waited for",
            goal=BLOCKED_GOAL,
        ),
        Row(
            "a save beside the next step: what the step takes longer",
            (middle["step with a save"] - middle["step"]) * 1e3,
            "ms",
            save_s * 1e3,
            "the same save, waited for",
        ),
        Row(
            "a save of 200 MB from 4 ranks, on disk",
            save_s * 1e3,
            "ms",
            middle["torch.save"] * 1e3,
            torchs,
            noise,
            TIME_GOAL,
        ),
        Row(
            "the same, copied first as beside training",
            middle["copied"] * 1e3,
            "ms",
            middle["torch.save"] * 1e3,
            torchs,
            noise,
            TIME_GOAL,
        ),
        Row(
            "a save of 200 MB from 4 ranks, beside dcp.save",
            save_s * 1e3,
            "ms",
            middle["dcp.save"] * 1e3,
            "torch.distributed.checkpoint.save",
            noise,
        ),
        *(row for way in (ASYNC_SAVE, ASYNC_STAGING) for row in _beside(way, middle)),
    ]


def _beside(way: str, middle: dict[str, float]) -> list[Row]:
    """Return what a save costs training beside what a way of torch's costs it."""
    return [
        Row(
            f"training stands still, beside {way}",
            middle["blocked"] * 1e3,
            "ms",
            middle[f"{way}, blocked"] * 1e3,
            way,
        ),
        Row(
            f"a save and its step, beside {way}",
            middle["step with a save"] * 1e3,
            "ms",
            middle[way] * 1e3,
            way,
        ),
    ]
