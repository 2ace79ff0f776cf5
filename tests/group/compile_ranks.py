"""What the ranks run in test_compile: a model that is compiled before or after it is spread."""

from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from nbdist.engine.checks.checks import RankChecks
from nbdist.engine.component import EndedCell
from nbdist.engine.data.order.shards import data_shard
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.policies.efficiency import ActivationCheckpoint
from nbdist.engine.layout.policies.policies import Pipeline
from nbdist.engine.layout.weights import full_tensors
from nbdist.engine.tap import tap
from nbdist.engine.training import training as hooks
from nbdist.shared.errors import LayoutError
from tests.group import models, parity_ranks
from tests.group import tensor_parallel_ranks as words

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


class Dropping(nn.Sequential):
    """What its module makes, with some of it dropped."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, nn.Dropout(0.2))


class Words(parity_ranks.GPT):
    """Two blocks that every axis can cut."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.blocks[:2]


class Forgetful(Words):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            mlp = block.get_submodule("mlp")
            mlp.down = Dropping(mlp.get_submodule("down"))


SMALL = ("ddp", "zero3")


def make(layout: str) -> nn.Module:
    torch.manual_seed(0)
    return (Small() if layout in SMALL else Words()).double()


def batch(layout: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    if layout not in SMALL:
        return words.batch(step)
    random = torch.Generator().manual_seed(step)
    x = torch.randn(8, 8, generator=random, dtype=torch.float64)
    return x, torch.randint(10, (8,), generator=random)


def loss_of(layout: str, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return models.loss_of("conv" if layout in SMALL else "gpt", out, y)


@cache
def alone(layout: str) -> dict[str, torch.Tensor]:
    """Return the weights after training in one process, without a compiler."""
    model = make(layout)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(layout, step)
        loss_of(layout, model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def trained(layout: str, when: str, backend: str, *policies: Any) -> dict[str, Any]:
    """Train a compiled model; between its steps a cell ends and another one begins."""
    torch._dynamo.reset()
    counters.clear()
    model = make(layout)
    names = [name for name, _ in model.named_parameters()]
    called = compiled(model, backend) if when == "before" else model
    if when.endswith(", before"):
        compile_in_place(model, when, backend)
    spread = parallelize(called, layout, *policies)
    compiled_for_it = counters["stats"]["unique_graphs"]
    if when == "after":
        called = compiled(model, backend)
    elif when.endswith(", after"):
        compile_in_place(model, when, backend)
    recorder = Recorded()
    hooks.here.install(recorder)  # type: ignore[arg-type]
    hooks.here.begin_cell()
    checks = RankChecks(lambda _kind, _step, _values: None)
    opt = torch.optim.SGD(called.parameters(), lr=0.1)
    shard = data_shard()
    graphs = []
    tap.reset_counts()
    for step in range(STEPS):
        checks.cell_ended(EndedCell(1, "", has_succeeded=True))
        checks.optimizer_begins(opt)
        checks.step_ended(1)  # the next one is looked at as well
        x, y = (t.chunk(shard.count)[shard.index] for t in batch(layout, step))
        if spread.pipeline is None:
            loss_of(layout, called(x), y).backward()
        else:
            spread.step(x, y, partial(loss_of, layout))
        opt.step()
        opt.zero_grad()
        checks.step_ended(2)
        graphs.append(counters["stats"]["unique_graphs"])
    collectives = sum(tap.counts().values())
    steps = hooks.here.end_cell()
    expected = alone(layout)
    found = {name: t.detach().clone() for name, t in full_tensors.tensors(spread)}
    return {
        "steps": steps,
        "collectives": collectives,
        "graphs": graphs,
        "compiled for it": compiled_for_it,
        # A stage has those of its blocks alone.
        "names": [n for n, _ in spread.model.named_parameters()]
        == [
            n
            for n in names
            if spread.pipeline is None or n in dict(spread.model.named_parameters())
        ],
        "same object": spread.model is model and parallelize(called, layout, *policies) is spread,
        "by": max(float((found[n] - expected[n]).abs().max()) for n in found or expected),
    }


def compiled(model: nn.Module, backend: str) -> Any:
    return torch.compile(model, backend=backend)


def compile_in_place(model: nn.Module, when: str, backend: str) -> None:
    whole = iter([model])
    for module in model.get_submodule("blocks").children() if when.startswith("blocks") else whole:
        module.compile(backend=backend)


def dropped(layout: str, how: str) -> list[float]:
    """Return the losses of steps with dropout, of a model that is compiled or not."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Forgetful().double()
    spread = parallelize(model, layout)
    if how != "never":
        compile_in_place(model, how, "aot_eager")
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(7)
    losses = []
    for step in range(STEPS):
        loss = spread.step(*batch(layout, step), partial(loss_of, layout))
        assert loss is not None
        losses.append(float(loss))
        opt.step()
        opt.zero_grad()
    return losses


def refused() -> list[str]:
    """Return what is said of `torch.compile(model)` with pp, before and after, and with tp."""
    model = make("pp=2")
    texts = []
    for attempt in (
        lambda: parallelize(compiled(model, "eager"), "pp=2"),
        lambda: after(model),
        lambda: parallelize(compiled(make("tp=2"), "eager"), "tp=2", ActivationCheckpoint()),
    ):
        try:
            attempt()
        except LayoutError as error:
            texts.append(str(error))
    return texts


def after(model: nn.Module) -> None:
    parallelize(model, "pp=2", Pipeline(microbatches=2))
    compiled(model, "eager")(batch("pp=2", 0)[0])


def on_two_ranks(cases: list[tuple[Any, ...]]) -> dict[str, Any]:
    """One group for all."""
    tap.install()
    return {
        "trained": [trained(*case) for case in cases],
        "refused": refused(),
    }


def with_dropout(layouts: list[str]) -> dict[str, list[list[float]]]:
    return {layout: [dropped(layout, how) for how in ("never", "blocks")] for layout in layouts}
