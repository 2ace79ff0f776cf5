"""What the ranks run in test_compile: a model that is compiled before or after it is spread."""

from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from nbdist.engine.checks.checks import Checks
from nbdist.engine.data import data_shard
from nbdist.engine.layout import whole
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.tap import tap
from nbdist.engine.training import training as hooks
from nbdist.errors import LayoutError
from tests.group import models

STEPS = 3


class Recorded:
    """A recorder that keeps what a rank would tell."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def add(self, kind: str, step: int, values: dict[str, float], data: Any = None) -> None:
        self.kinds.append(kind)

    def fact(self, **_facts: str) -> None: ...


class Block(nn.Module):
    """Has a forward of its own: with shards torch compiles block by block, and none of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(x))


class Small(nn.Module):
    """Two small blocks, for compiling takes long."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Small().double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    x = torch.randn(8, 8, generator=random, dtype=torch.float64)
    return x, torch.randint(10, (8,), generator=random)


def alone() -> dict[str, torch.Tensor]:
    """Return the weights after training in one process, without a compiler."""
    model = make()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step)
        models.loss_of("conv", model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def trained(layout: str, when: str, backend: str, *policies: Any) -> dict[str, Any]:
    """Train a compiled model; between its steps a cell ends and another one begins."""
    torch._dynamo.reset()
    counters.clear()
    model = make()
    names = [name for name, _ in model.named_parameters()]
    called: Any = model
    if when == "before":
        called = torch.compile(model, backend=backend)
    elif when == "in place, before":
        model.compile(backend=backend)
    spread = parallelize(called, layout, *policies)
    if when == "after":
        called = torch.compile(model, backend=backend)
    elif when == "in place, after":
        model.compile(backend=backend)
    recorder = Recorded()
    hooks.install(recorder)  # type: ignore[arg-type]
    hooks.begin_cell()
    checks = Checks(lambda _kind, _step, _values: None)
    opt = torch.optim.SGD(called.parameters(), lr=0.1)
    shard = data_shard()
    graphs = []
    tap.reset_counts()
    for step in range(STEPS):
        checks.end_cell()
        checks.optimizer_begins(opt)
        checks.step_ended(1)  # the next one is looked at as well
        x, y = (t.chunk(shard.count)[shard.index] for t in batch(step))
        models.loss_of("conv", called(x), y).backward()
        opt.step()
        opt.zero_grad()
        checks.step_ended(2)
        graphs.append(counters["stats"]["unique_graphs"])
    collectives = sum(tap.counts().values())
    steps = hooks.end_cell()
    expected = alone()
    found = {name: t.detach().clone() for name, t in whole.tensors(spread)}
    return {
        "steps": steps,
        "collectives": collectives,
        "graphs": graphs,
        "names": [n for n, _ in spread.model.named_parameters()] == names,
        "same object": spread.model is model and parallelize(called, layout, *policies) is spread,
        "by": max(float((found[n] - expected[n]).abs().max()) for n in names),
    }


def refused(layout: str) -> str:
    try:
        parallelize(torch.compile(make(), backend="eager"), layout)
    except LayoutError as error:
        return str(error)
    return "accepted"


def on_two_ranks(cases: list[tuple[Any, ...]]) -> dict[str, Any]:
    """One group for all."""
    tap.install()
    return {
        "trained": [trained(*case) for case in cases],
        "refused": {layout: refused(layout) for layout in ("tp=2", "cp=2", "pp=2")},
    }
