"""What `parallelize` adds to a step over the same layout written by hand in torch.

Two real ranks train both in turn, in short blocks, so that what else the machine does falls on
both alike; what is told is the median of the differences between neighbours. The hand's model is
there twice: the two differ by the noise. The conv net has batch norm: its statistics are kept alike
by nbdist and by DDP, and not by `fully_shard`, beside which the hand does so in one row; the other,
which does less than nbdist, has no goal. Under tp the hand cuts what nbdist's plan cuts, with
torch's styles.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from tests.benchmarks.table import Row

GOAL_US = 200.0
ROUNDS = 80
STEPS = 3


def measure(name: str, layout: str, alike: bool) -> tuple[float, float, float]:
    """Return (by hand, added, added by another hand) in us of processor time a step on this rank.

    With `alike`, the hand also gives every rank rank 0's buffers after each forward.
    """
    import torch
    import torch.distributed as dist

    from nbdist.engine.layout.parallelize import parallelize
    from tests.group import models, parity_ranks

    torch.set_num_threads(1)
    x, y = models.batch(name, 0 if layout.startswith("tp") else dist.get_rank(), 4, torch.float32)
    make = parity_ranks.MODELS[name]
    by_hand, again, ours = (*(_written_by_hand(make(), layout) for _ in range(2)), make())
    parallelize(ours, layout)
    if alike:
        for model in (by_hand, again):
            model.register_forward_hook(_give_buffers)

    def stepper(model: Any) -> Callable[[], None]:
        opt = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            models.loss_of(name, model(x), y).backward()
            opt.step()
            opt.zero_grad()

        return step

    steps = {"hand": stepper(by_hand), "ours": stepper(ours), "again": stepper(again)}
    took: dict[str, list[float]] = {label: [] for label in steps}
    for round_number in range(ROUNDS + 2):
        for label, step in steps.items():
            dist.barrier()
            began = time.process_time_ns()
            for _ in range(STEPS):
                step()
            if round_number >= 2:  # DDP rebuilds its buckets in its second iteration
                took[label].append((time.process_time_ns() - began) / STEPS / 1e3)

    def added(label: str) -> float:
        pairs = zip(took[label], took["hand"], strict=True)
        return statistics.median(one - hand for one, hand in pairs)

    return statistics.median(took["hand"]), added("ours"), added("again")


def _give_buffers(model: Any, *_: object) -> None:
    import torch.distributed as dist

    for buffer in model.buffers():
        dist.broadcast(buffer.data, 0)


def _written_by_hand(model: Any, layout: str) -> Any:
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout.startswith("tp"):
        return _cut_by_hand(model)
    blocks = list(model.blocks) if hasattr(model, "blocks") else [*model.layer_1, *model.layer_2]
    keep = layout == "zero2"
    for block in blocks:
        fully_shard(block, reshard_after_forward=not keep)
    return fully_shard(model, reshard_after_forward=False if keep else None)


def _cut_by_hand(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {
        "token": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for name in ("attn.q", "attn.k", "attn.v", "mlp.up"):
        plan[f"blocks.*.{name}"] = ColwiseParallel()
    for name in ("attn.out", "mlp.down"):
        plan[f"blocks.*.{name}"] = RowwiseParallel()
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


CASES = [
    ("gpt", "ddp", False),
    ("gpt", "zero2", False),
    ("gpt", "zero3", False),
    ("gpt", "tp=2", False),
    ("conv", "ddp", False),
    ("conv", "zero3", False),
    ("conv", "zero3", True),
]


def rows() -> list[Row]:
    """Return a row a model and layout: processor time that parallelize adds to a step."""
    from tests.group.harness import run_ranks

    found = []
    for name, layout, alike in CASES:
        per_rank = run_ranks(2, measure, name, layout, alike, timeout_s=120)
        by_hand, added, noise = (statistics.mean(part) for part in zip(*per_rank, strict=True))
        what = f'added by parallelize, "{layout}", {name}'
        does_less = (name, layout, alike) == ("conv", "zero3", False)
        found.append(
            Row(
                what + (", statistics alike" if alike else ""),
                added,
                "us",
                by_hand,
                "by hand",
                abs(noise) / by_hand,
                None if does_less else GOAL_US,
                "measured",
                is_share=True,
            )
        )
    return found
