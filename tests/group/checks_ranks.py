"""What the ranks run in test_checks: trainings, right and wrong, and what their ranks tell."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nbdist.engine.checks.checks import RankChecks
from nbdist.engine.checks.fingerprints import SELECTION, fingerprints
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.steps import step_state
from tests.group import models

Told = list[tuple[int, dict[str, float]]]


def count_steps() -> None:
    """Have the boundary count steps, as in each rank of a notebook."""
    step_state.install(lambda _: (), lambda _, __: None)


def told(name: str, layout: str, spoil: str | None = None, steps: int = 5) -> Told:
    """Train under a layout; rank 1 changes the tensor `spoil` by one bit after step 2."""
    count_steps()
    model = models.make(name, torch.float32, seed=dist.get_rank())
    parallelize(model, layout)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    records: Told = []

    def add(kind: str, step: int, values: dict[str, float]) -> None:
        if kind == "alike":
            records.append((step, values))

    checks = RankChecks(add)
    checks.optimizer_begins(opt)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(1, steps + 1):
        x, y = models.batch(name, step, 8, torch.float32)
        models.loss_of(name, model(x.chunk(world)[rank]), y.chunk(world)[rank]).backward()
        opt.step()
        opt.zero_grad()
        if step == 2 and spoil and rank == 1:
            _change(dict([*model.named_parameters(), *model.named_buffers()])[spoil])
        checks.step_ended(step)
    return records


@torch.no_grad()
def _change(tensor: torch.Tensor) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    value = local.view(-1)[0]
    value.copy_(torch.nextafter(value, value + 1))


def frozen_since() -> Told:
    """Return what is told where rank 1 changes a parameter, and the first one is frozen by then."""
    records: Told = []
    checks = RankChecks(
        lambda kind, step, values: records.append((step, values)) if kind == "alike" else None
    )
    net = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(2)))
    net[1].requires_grad_(False)
    count_steps()
    parallelize(net, "ddp")
    for step in range(1, 21):
        if step in (1, 4):
            net[0].requires_grad_(step == 1)
            net[1].requires_grad_(step == 4)
            opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05)
            checks.optimizer_begins(opt)
        net(torch.tensor([[dist.get_rank() + 1.0]])).sum().backward()
        opt.step()
        opt.zero_grad()
        if step == 4 and dist.get_rank() == 1:
            _change(list(net.parameters())[1])
        checks.step_ended(step)
    return records


def a_judge_that_another_models_loss_runs_through() -> list[float]:
    """Return the sums that are told of a GAN's judge, whose maker no optimizer steps."""
    torch.manual_seed(0)
    making, judging = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
    parallelize(judging, "ddp")
    opt, sums = torch.optim.SGD(judging.parameters(), lr=0.1), []

    def add(kind: str, step: int, values: dict[str, float]) -> None:
        if kind == "use" and step:
            sums.append(values["sums"])

    checks = RankChecks(add)
    checks.optimizer_begins(opt)
    for step in range(1, 6):
        fake = making(torch.randn(8, 4))
        opt.zero_grad()
        judging(fake.detach()).square().mean().backward()
        opt.step()
        checks.step_ended(step)
        judging(fake).mean().backward()
    return sums


def whole(model: torch.nn.Module) -> torch.Tensor:
    parameters = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in parameters])


def trained_in_parts(way: str) -> torch.Tensor:
    """Return the weights after steps of two backwards each.

    Args:
        way: "one process"; "each": all backwards average; or an advice: "no_sync", which the last
            backward of a step is out of, or a layout, whose `accumulate` is used.
    """
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
    ).double()
    x, parts = torch.randn(8, 4).double(), range(2)
    if way == "no_sync":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif way != "one process":
        layout = parallelize(model, "ddp" if way == "each" else way)
    mine = [x] if way == "one process" else x.chunk(2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for part in layout.accumulate(2) if way in ("ddp", "zero2", "zero3") else parts:
            rows = mine[dist.get_rank() if len(mine) > 1 else 0].chunk(2)[part]
            with model.no_sync() if way == "no_sync" and not part else nullcontext():
                (model(rows).square().mean() / 2).backward()
        opt.step()
        opt.zero_grad()
    return whole(model)


def in_parts() -> dict[str, float]:
    """Return how far the weights of each way are from those of one process."""
    expected = trained_in_parts("one process")
    ways = ("each", "no_sync", "ddp", "zero2", "zero3")
    return {way: float((trained_in_parts(way) - expected).abs().max()) for way in ways}


def cases(asked: list[tuple[str, str, str | None]]) -> list[Told]:
    """Return what this rank told in each training."""
    return [told(*case) for case in asked]


def prints_of_tensors() -> dict[str, Any]:
    """Return which kinds of tensors and which changes fingerprints tell apart."""
    large = torch.arange(3 * SELECTION, dtype=torch.float32)
    kinds = [
        torch.ones(3, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
    ]
    kinds += [torch.ones(2, 3).t(), torch.ones(3, dtype=torch.complex64), torch.tensor(2.0)]
    nan = torch.tensor([float("nan"), 1.0])
    other_bits = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    return {
        "kinds": len(fingerprints(kinds)),
        "same": torch.equal(fingerprints([large]), fingerprints([large.clone()])),
        "nan is itself": torch.equal(fingerprints([nan]), fingerprints([nan.clone()])),
        "whatever its bits": torch.equal(fingerprints([nan]), fingerprints([other_bits])),
        "one of many": not torch.equal(fingerprints([large]), fingerprints([large + 1])),
    }
