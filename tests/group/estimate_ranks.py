"""What the ranks run in test_estimates: an estimate, and the same step with numbers, measured."""

# B samples of a rank, S sequence, V words, D width, E experts

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import nbdist
from nbdist.engine.compat import torch_modules
from nbdist.engine.compat.torch_hooks import local_part
from nbdist.engine.dry import live_bytes, step
from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.policies.efficiency import (
    ActivationCheckpoint,
    Compress,
    Offload,
    Precision,
)
from nbdist.engine.tap import tap
from nbdist.shared.errors import NBDistError
from nbdist.study.estimate import shapes_of

B, S, V, D, E = 8, 64, 500, 96, 4
POLICIES: dict[str, tuple[object, ...]] = {
    "": (),
    "checkpoint": (ActivationCheckpoint(),),
    "bf16 reduced": (Precision("fp32", reduce="bf16"),),
    "compress bf16": (Compress("bf16"),),
    "compress fp16 alone": (Compress("fp16", error_feedback=False),),
    "compress powersgd": (Compress("powersgd", start=2),),
    "compress between": (Compress("bf16", between=2),),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(D), 4
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (
            f(h).unflatten(-1, (-1, D // 4)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, D, 2 * D) / D)
        self.down = nn.Parameter(torch.randn(E, 2 * D, D) / D)

    def forward(self, h: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        made = torch.zeros_like(h)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            share = (weight * (index == expert)).sum(1, keepdim=True)
            made = made + share * (F.relu(h @ up) @ down)
        return made


class Mixture(nn.Module):
    """Two experts a token, each of which gets as many."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, E), Experts()

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(0, -2)
        index = (torch.arange(len(h))[:, None] + torch.arange(2)) % E
        weight = self.gate(h).softmax(-1).gather(1, index)
        return x + self.experts(h, index, weight).view_as(x)


class Mixed(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(), Mixture()) for _ in range(2))


class Perceptron(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(S, 1000), nn.ReLU(), nn.Linear(1000, V))


class Frozen(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)


class Deciding(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


MODELS: dict[str, type[nn.Module]] = {
    "decoder": Decoder,
    "mlp": Perceptron,
    "frozen": Frozen,
    "mixture": Mixed,
}


def batch_of(model: str) -> tuple[Tensor, Tensor]:
    if model == "mlp":
        return torch.rand(B, S), torch.randint(V, (B,))
    return torch.randint(V, (B, S)), torch.randint(V, (B, S))


def loss_of(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), y.flatten())


def estimated(n: int, cases: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """Return estimates for n ranks; runs on one."""
    found = []
    for model, layout, policy in cases:
        one = nbdist.estimate(
            MODELS[model], batch_of(model), layout, n, *POLICIES[policy], loss=loss_of
        )
        ranks = [(r.parameters, r.gradients, r.optimizer, r.peak) for r in one.ranks]
        traffic = [sum(getattr(t, of) for t in one.traffic.values()) for of in ("count", "payload")]
        found.append({"ranks": ranks, "traffic": traffic, "text": str(one)})
    return found


def operations(layout: str, sizes: list[int]) -> list[int]:
    """Return how many operations are run for an estimate of so many ranks; runs outside of any."""
    run: list[object] = []
    count = live_bytes.LiveBytes.count

    def noted(live: live_bytes.LiveBytes, *seen: Any) -> None:
        run.append(seen[0])
        count(live, *seen)

    live_bytes.LiveBytes.count = noted  # type: ignore[method-assign,assignment]
    batch = shapes_of(batch_of("decoder"))
    counts = []
    for size in sizes:
        given = (MODELS["decoder"], batch, layout, (), size, 8, loss_of, torch.optim.AdamW)
        run.clear()
        step.measure(step.Asked(*given), 0)
        counts.append(len(run))
    return counts


CELL = """
from tests.group.estimate_ranks import Decoder, batch_of, loss_of
layout = nbdist.parallelize(Decoder(), "{}")
optimizer = layout.optimizer(torch.optim.AdamW)
for step in range(3):
    x, y = batch_of("decoder")
    loss = loss_of(layout.model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def peaks_of_dry_cells(layouts: list[str]) -> list[int]:
    """Return the bytes that dry cells of two ranks predict; runs on one."""
    return [nbdist.dry(CELL.format(layout), 2).peak for layout in layouts]


def peaks_of_cells(layouts: list[str]) -> list[int]:
    """Return the most bytes that were allocated at once while these cells ran."""
    found = []
    for layout in layouts:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            exec(CELL.format(layout), {"nbdist": nbdist, "torch": torch})
        found.append(_most_more(profiled))
    return found


def nothing() -> None:
    return None


def failing() -> nn.Module:
    raise ValueError("no such file")


def elsewhere() -> Any:
    """Return a function of a module that no other process can import."""
    module = sys.modules["nowhere"] = ModuleType("nowhere")
    exec("def make(): ...", vars(module))
    return module.make


def refused() -> list[str]:
    """Return what the errors of estimates say that there are none of."""
    batch, found = batch_of("mlp"), []
    for factory, layout, policies in [
        (Deciding, "ddp", ()),
        (Perceptron(), "ddp", ()),
        (Perceptron, "dp=3", ()),
        (Perceptron, "zero3", (Offload(),)),
        (failing, "ddp", ()),
        (nothing, "ddp", ()),
        (elsewhere(), "ddp", ()),
    ]:
        try:
            nbdist.estimate(factory, batch, layout, 2, *policies, loss=loss_of)
        except NBDistError as error:
            found.append(str(error))
    return found


def measured(cases: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """Return what this rank holds, by torch's profiler, and sends, by the tap."""
    tap.install("full")
    return [_measured(*case) for case in cases]


def _measured(name: str, text: str, policy: str) -> dict[str, Any]:
    layout = parallelize(MODELS[name](), text, *POLICIES[policy])
    optimizer = layout.optimizer(torch.optim.AdamW)
    batch = batch_of(name)
    for _ in range(3):  # that of PowerSGD has started
        _step(layout, optimizer, batch)
    held = [*layout.model.parameters(), *layout.model.buffers(), *batch]
    own: Any = getattr(optimizer, "optim", optimizer)
    states = [t for state in own.state.values() for t in state.values()]
    before = _bytes([*held, *states, *_kept_by_hooks(layout)]) + _room_of_buckets(layout)
    tap.take()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        gradients = _step(layout, optimizer, batch)
    totals = tap.take()
    return {
        "parameters": _bytes(held[: -len(batch)]),
        "gradients": gradients,
        "optimizer": _bytes(states),
        "peak": before + _most_more(profiled),
        "count": totals.collectives,
        "payload": totals.bytes,
    }


def _step(layout: Layout, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> int:
    x, y = batch
    if layout.shape.pp > 1:
        layout.step(x, y, loss_of)
    else:
        loss_of(layout.model(x), y).backward()
    gradients = _bytes([p.grad for p in layout.model.parameters() if p.grad is not None])
    optimizer.step()
    optimizer.zero_grad()
    return gradients


def _bytes(tensors: list[Any]) -> int:
    storages = [local_part(t).untyped_storage() for t in tensors]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def _kept_by_hooks(layout: Layout) -> list[Tensor]:
    """Return what hooks of DDP's reducer remember of a step, such as rounding errors."""
    reducer = torch_modules.reducer_of(layout.model)
    states = [] if reducer is None else [s for _, s in torch_modules.comm_hooks_of(reducer)]
    names = "errors", "loose", "error_dict", "p_memory_dict", "q_memory_dict"
    return [t for state in states for name in names for t in getattr(state, name, {}).values()]


def _room_of_buckets(layout: Layout) -> int:
    """Return the bytes that DDP's reducer keeps beside gradients: it allocates them but once."""
    is_reduced = layout.shape.fsdp == 1 and not layout.shape.is_cut
    trained = [p for p in layout.model.parameters() if p.requires_grad]
    return _bytes(trained) if is_reduced else 0


def _most_more(profiled: Any) -> int:
    """Return how many bytes more than at the beginning were allocated at once."""
    events = profiled.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    now = most = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        now += change
        most = max(most, now)
    return most
