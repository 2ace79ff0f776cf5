"""What the ranks run in test_verify: right programs, planted bugs, and what is left as it was."""

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from nbdist.engine.compat import torch_hooks, torch_modules
from nbdist.engine.data.order.shards import data_shard
from nbdist.engine.layout import verify_magic
from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.policies.efficiency import Compress, Precision
from nbdist.engine.layout.policies.policies import ContextParallel, Pipeline, TensorParallel
from nbdist.engine.layout.verify.report import Proof
from nbdist.engine.layout.weights import buffers, full_tensors
from nbdist.engine.training import training as hooks
from nbdist.engine.training.mean import mean as mean_over
from nbdist.shared.errors import LayoutError
from tests.group import models
from tests.group import tensor_parallel_ranks as tensor_parallel

Batch = tuple[Tensor, Tensor]


class Dropping(tensor_parallel.MLP):
    """Drops by a module, by a function and in attention; and draws by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.drop(super().forward(x)), 0.3, self.training)


def make(name: str, dtype: torch.dtype) -> nn.Module:
    if name in ("small", "conv"):
        return models.make("gpt" if name == "small" else name, dtype, seed=dist.get_rank())
    if name == "dropping":
        torch.manual_seed(0)
        return tensor_parallel.GPT(tensor_parallel.block_of(mlp=Dropping)).to(dtype)
    if name == "untied":
        model = tensor_parallel.make("gpt", dtype, seed=dist.get_rank())
        model.get_submodule("head").weight = nn.Parameter(
            model.get_parameter("token.weight").detach().flip(0)
        )
        return model
    return tensor_parallel.make(name, dtype, seed=dist.get_rank())


def batch(name: str, dtype: torch.dtype) -> Batch:
    """Return this rank's part of a batch."""
    if name == "conv":
        x, y = models.batch("conv", 0, 16, dtype)
    else:
        halves = [tensor_parallel.batch(step) for step in (0, 1)]
        x, y = (torch.cat(both) % models.V for both in zip(*halves, strict=True))
    shard = data_shard()
    return x.chunk(shard.count)[shard.index], y.chunk(shard.count)[shard.index]


def loss_of(out: Any, y: Tensor) -> Tensor:
    if hasattr(out, "logits"):
        out = out.logits
    return F.cross_entropy(out.flatten(0, -2), y.flatten())


def proof_of(
    name: str, layout: str, dtype: torch.dtype = torch.float32, *policies: Any, steps: int = 3
) -> Proof:
    spread = parallelize(make(name, dtype), layout, *policies)
    return spread.verify(batch(name, dtype), loss_of, steps=steps)


def right_programs(cases: list[tuple[Any, ...]]) -> list[Proof]:
    return [proof_of(*case) for case in cases]


class Chaotic(nn.Module):
    """Batch norms of two samples, one after the other: round-off grows a hundredfold a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU())
                for _ in range(12)
            )
        )
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.layers(x))


def small_resnet() -> nn.Module:
    """Return resnet18, as transformers has it, of a quarter of its width."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 64, 128],
        depths=[2, 2, 2, 2],
        layer_type="basic",
    )
    config.num_labels = 10
    return ResNetForImageClassification(config)


def drifting(name: str, layout: str, scale: float = 1.0) -> Proof:
    """Return the proof of a deterministic model in which round-off grows.

    Args:
        name: "resnet" or "chaotic".
        layout: Its layout.
        scale: Of one gradient, a planted mistake.
    """
    torch.manual_seed(0)
    model = small_resnet() if name == "resnet" else Chaotic()
    torch.manual_seed(1)
    x = torch.randn(8, 3, 64, 64) if name == "resnet" else torch.randn(8, 8)
    y = torch.randint(0, 10, (8,)) if name == "resnet" else torch.randn(8, 1)
    part = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    spread = parallelize(model, layout)
    if scale != 1:
        last = list(spread.model.parameters())[-2]
        last.register_hook(lambda gradient: gradient * scale)

    def loss_fn(out: Any, y: Tensor) -> Tensor:
        return F.cross_entropy(out.logits, y) if name == "resnet" else F.mse_loss(out, y)

    return spread.verify((x[part], y[part]), loss_fn, steps=5)


# ---- Planted bugs -------------------------------------------------------------------------------


def planted(
    plant: Callable[[nn.Module], None], layout: str, name: str = "small", *policies: Any
) -> Proof:
    spread = parallelize(make(name, torch.float32), layout, *policies)
    plant(spread.model)
    return spread.verify(batch(name, torch.float32), loss_of, steps=2)


def scale_one_gradient(model: Any) -> None:
    model.blocks[1].up.weight.register_hook(lambda gradient: gradient * 1.01)


def scale_by_a_millionth() -> Proof:
    spread = parallelize(make("untied", torch.float64), "tp=2")
    weight = spread.model.get_parameter("blocks.1.mlp.up.weight")
    weight.register_hook(lambda gradient: gradient * (1 + 1e-6))
    return spread.verify(batch("untied", torch.float64), loss_of, steps=1)


def scale_one_shard(model: Any) -> None:
    """FSDP calls no hooks of shards: the weight itself has another gradient than it should."""
    up = model.blocks[1].up
    up.forward = lambda x: F.linear(x, up.weight + 0.01 * (up.weight - up.weight.detach()), up.bias)


def scale_on_rank_1(model: Any) -> None:
    if dist.get_rank() == 1:
        model.blocks[2].down.bias.register_hook(lambda gradient: gradient * 1.01)


def scale_from_step_2(model: Any) -> None:
    calls = 0

    def scale(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return gradient * 1.01 if calls > 1 else gradient

    model.blocks[0].out.weight.register_hook(scale)


def other_weights(model: Any) -> None:
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.norm.weight[3] += 1e-6


def double_in_a_block(model: Any) -> None:
    """Have one product's gradient twice as large, and its value as it is."""
    up = model.blocks[1].up
    linear = up.forward

    def forward(x: Tensor) -> Tensor:
        out: Tensor = linear(x)
        return 2 * out - out.detach()

    up.forward = forward


def forget_a_block(model: Any) -> None:
    block = model.blocks[1]
    block.forward = lambda x: x + 0 * type(block).forward(block, x)


def drop_less_on_rank_1(model: Any) -> None:
    if dist.get_rank() == 1:
        model.blocks[1].mlp.drop.p = 0.0


def keep_statistics_at_home(model: Any) -> None:
    for number, hook in list(model._forward_hooks.items()):
        if isinstance(getattr(hook, "__self__", None), buffers.BufferSync):
            del model._forward_hooks[number]


def detach_on_rank_1(model: Any) -> None:
    """Cut the graph under the last block, so that nothing before it is trained there."""
    if dist.get_rank() == 1:
        model.blocks[-1].register_forward_pre_hook(lambda _module, args: (args[0].detach(),))


def not_averaged(*policies: Any) -> Proof:
    """One parameter keeps the gradient of its own rank, as where a rank does not synchronise it."""
    spread = parallelize(models.make("gpt", torch.float32), "ddp", *policies)
    lose_an_average(spread, spread.model.get_parameter("blocks.0.up.bias"))
    return spread.verify(batch("small", torch.float32), loss_of, steps=2)


def lose_an_average(spread: Layout, lost: Any) -> None:
    own: list[Tensor] = []
    lost.register_hook(lambda gradient: own.append(gradient.clone()))
    synchronised = spread._step

    def step(*args: Any, **named: Any) -> Tensor | None:
        loss = synchronised(*args, **named)
        lost.grad.copy_(own.pop())
        return loss

    spread._step = step  # type: ignore[method-assign]


def wrong_plan() -> Proof:
    """Cut a norm's features, in torch's own styles, which nbdist takes as they are."""
    torch.manual_seed(0)
    model = tensor_parallel.GPT(tensor_parallel.block_of(mlp=tensor_parallel.NormedFeatures))
    plan = {"blocks.1.mlp.up": ColwiseParallel(), "blocks.1.mlp.down": RowwiseParallel()}
    spread = parallelize(model, "tp=2", TensorParallel(plan))
    return spread.verify(batch("gpt", torch.float32), loss_of, steps=2)


PLANTED: dict[str, Callable[[], Proof]] = {
    "one gradient": lambda: planted(scale_one_gradient, "ddp"),
    "one millionth, float64": scale_by_a_millionth,
    "one gradient, shards": lambda: planted(scale_one_shard, "zero3"),
    "on rank 1": lambda: planted(scale_on_rank_1, "ddp"),
    "from step 2": lambda: planted(scale_from_step_2, "ddp"),
    "weights": lambda: planted(other_weights, "ddp"),
    "block": lambda: planted(forget_a_block, "zero3"),
    "dropout": lambda: planted(drop_less_on_rank_1, "ddp", "dropping"),
    "statistics": lambda: planted(keep_statistics_at_home, "ddp", "conv"),
    "not averaged": not_averaged,
    "not averaged, bf16": lambda: not_averaged(Precision("bf16")),
    "twice, bf16": lambda: planted(double_in_a_block, "zero3", "small", Precision("bf16")),
    "twice, fp16": lambda: planted(double_in_a_block, "ddp", "small", Precision("fp16")),
    "detached": lambda: planted(detach_on_rank_1, "ddp"),
    "detached, shards": lambda: planted(detach_on_rank_1, "zero3"),
    "detached, tp": lambda: planted(detach_on_rank_1, "tp=2", "gpt"),
    "plan": wrong_plan,
}


def planted_bugs() -> dict[str, Proof]:
    return {label: plant() for label, plant in PLANTED.items()}


# ---- What is left as it was ---------------------------------------------------------------------


class Recorded:
    """A recorder that keeps what a rank would tell."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, dict[str, float]]] = []

    def add(self, kind: str, step: int, values: dict[str, float], data: Any = None) -> None:
        self.rows.append((kind, step, values))

    def fact(self, **_facts: str) -> None: ...


def train(layout: str, name: str, proofs: int, fail: bool = False) -> tuple[list[Any], list[Any]]:
    """Train four steps; between them, and with gradients held, prove so many times.

    Returns what a difference would show in, and the rows of steps that were recorded.
    """
    recorder = Recorded()
    hooks.here.install(recorder)  # type: ignore[arg-type]
    hooks.here.begin_cell()
    torch.manual_seed(0)
    random.seed(0)
    model: Any = make(name, torch.float32)
    spread = parallelize(model, layout)
    model.calls = 0
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = batch(name, torch.float32)
    for step in range(4):
        loss_of(model(x), y).backward()
        if step in (1, 2):
            for _ in range(proofs):
                if fail:
                    fails_midway(spread, x, y)
                else:
                    assert spread.verify((x, y), loss_of, steps=2).ok
        opt.step()
        opt.zero_grad()
    model.eval()
    with torch.no_grad():
        out = model(x)
    state = [torch.get_rng_state(), *(t.clone() for _, t in full_tensors.tensors(spread)), out]
    told = [
        random.random(),
        model.calls,
        [m.training for m in model.modules()],
        hooks.here.end_cell(),
    ]
    return [t.tolist() for t in state] + told, [row[:2] for row in recorder.rows]


def fails_midway(spread: Layout, x: Tensor, y: Tensor) -> None:
    """Break a proof off in the second step's forward, as an interrupt would on every rank."""
    calls = 0

    def interrupt(_module: nn.Module, _args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise KeyboardInterrupt

    blocks = next(
        m for m in spread.model.children() if isinstance(m, nn.ModuleList | nn.Sequential)
    )
    hook = blocks[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        spread.verify((x, y), loss_of)
    hook.remove()


def is_left_as_it_was(layout: str, name: str) -> dict[str, bool]:
    expected, rows = train(layout, name, 0)
    proven, proven_rows = train(layout, name, 2)
    broken, broken_rows = train(layout, name, 1, fail=True)
    return {
        "after proofs": proven == expected,
        "after one broken off": broken == expected,
        "steps told": proven_rows == rows == broken_rows,
        "steps made": sum(kind == "step" for kind, _ in rows) == 4,
    }


class _Counting:
    """A model's state that is no buffer: each forward sees other samples."""

    def __init__(self) -> None:
        self.forwards = 0

    def __call__(self, _module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.forwards += 1
        return ((args[0] + self.forwards) % models.V,)


def refused() -> dict[str, str]:
    texts: dict[str, str] = {}

    def verify(label: str, model: nn.Module, layout: str, *args: Any, **kwargs: Any) -> None:
        spread = parallelize(model, layout)
        try:
            spread.verify(*args, **kwargs)
        except LayoutError as error:
            texts[label] = str(error)
        else:
            texts[label] = "accepted"

    x, y = models.batch("gpt", 0, 4, torch.float32)
    held = make("small", torch.float32)
    held.group = dist.group.WORLD  # type: ignore[assignment]
    verify("no skeleton", held, "ddp", (x, y), loss_of)
    verify("one tensor", make("small", torch.float32), "ddp", x, loss_of)
    counting = make("small", torch.float32)
    counting.register_forward_pre_hook(_Counting())
    verify("counting", counting, "ddp", (x, y), loss_of)
    verify("no step", make("small", torch.float32), "ddp", (x, y), loss_of, steps=0)
    verify("wrong loss", make("small", torch.float32), "ddp", (x, y), lambda out, y: out.nothing)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(models.make("conv", torch.float32))
    verify("sync", synced, "ddp", models.batch("conv", 0, 4, torch.float32), loss_of)
    few = models.batch("conv", 0, 3, torch.float32)
    verify("few", models.make("conv", torch.float32), "pp=2", few, loss_of)
    other = models.batch("gpt", dist.get_rank(), 4, torch.float32)
    verify("samples", make("gpt", torch.float32), "tp=2", other, loss_of)
    return texts


class TwoWays(nn.Module):
    """Uses another layer where it is given a second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return self.first(x) if other is None else self.first(x) + self.second(other)


def asked() -> dict[str, str]:
    """What the notebook is told after a plain loop, where no batch is known."""
    texts = {}
    for label in ("averaged", "not averaged"):
        spread = parallelize(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)), "ddp")
        if label == "not averaged":
            lose_an_average(spread, spread.model.get_parameter("0.weight"))
        texts[label] = str(verify_magic.verify("spread", {"spread": spread}))
    for layout in ("ddp", "zero2"):
        spread = parallelize(TwoWays(), layout)
        texts[f"two ways, {layout}"] = str(verify_magic.verify("spread", {"spread": spread}))
    spread = parallelize(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(7)), "ddp")
    texts["does not run"] = str(verify_magic.verify("spread", {"spread": spread}))
    return texts


def rank_1_alone() -> dict[str, str]:
    """What is said where one rank's loss goes another way, or none is one; then a right proof."""
    spread = parallelize(make("small", torch.float32), "zero3")
    x, y = batch("small", torch.float32)

    def fail(_out: Tensor, _y: Tensor) -> Tensor:
        raise ValueError("no such class")

    def on_rank_1(other: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return other if dist.get_rank() == 1 else loss_of

    def each(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none")

    losses = {
        "raises": on_rank_1(fail),
        "vector": on_rank_1(each),
        "nothing": on_rank_1(lambda out, y: None),
        "number": lambda out, y: float(loss_of(out, y)),
        "vector on all": each,
        "infinite": lambda out, y: loss_of(out, y) * math.inf,
        "right": loss_of,
    }
    texts = {}
    for label, loss_fn in losses.items():
        try:
            texts[label] = spread.verify((x, y), loss_fn, steps=1).verdict
        except LayoutError as error:
            texts[label] = str(error)
    return texts


def compressed(method: str) -> tuple[Proof, bool]:
    """Prove in the middle of a training; also return whether its hook is as it was."""
    spread = parallelize(make("small", torch.float32), "ddp", Compress(method, start=2))  # type: ignore[arg-type]
    opt = torch.optim.SGD(spread.model.parameters(), lr=0.01)
    x, y = batch("small", torch.float32)
    for _ in range(3):
        spread.step(x, y, loss_of)
        opt.step()
        opt.zero_grad()
    reducer = torch_modules.reducer_of(spread.model)
    assert reducer is not None
    ((_, state),) = torch_modules.comm_hooks_of(reducer)

    tables = [name for name in ("errors", "error_dict", "q_memory_dict") if hasattr(state, name)]

    def held() -> list[Any]:
        numbers = [{k: t.tolist() for k, t in getattr(state, name).items()} for name in tables]
        return [numbers, getattr(state, "iter", 0), getattr(state, "start_powerSGD_iter", 0)]

    before = held()
    proof = spread.verify((x, y), loss_of)
    assert any(before[0]), "it had nothing to remember"
    return proof, held() == before


def unequal_parts(layout: str) -> Proof:
    """Ranks bring 5 and 3 samples, which layout.step weighs."""
    spread = parallelize(make("small", torch.float32), layout)
    x, y = models.batch("gpt", 0, 8, torch.float32)
    mine = slice(0, 5) if dist.get_rank() == 0 else slice(5, 8)
    return spread.verify((x[mine], y[mine]), loss_of)


# ---- A mean over a count that varies -----------------------------------------------------------

KEPT_OF = (1, 5, 3, 2, 6, 4)  # of 6 tokens, by sample


def texts() -> Batch:
    torch.manual_seed(2)
    y = torch.randint(3, (6, 6))
    for sample, kept in zip(y, KEPT_OF, strict=True):
        sample[kept:] = -100
    return torch.randn(6, 6, 4).double(), y


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def advised(y: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss that docs/layouts.md has for parts of unequal counts."""
    kept = torch.tensor([(y != -100).sum(), len(y)])
    dist.all_reduce(kept)
    per_sample = kept[0] / kept[1]

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        total = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="sum")
        return total / len(y) / per_sample

    return loss_fn


def masked(way: str) -> tuple[str, str, float]:
    """Prove a masked mean and what is advised for it; train the latter beside one process.

    Args:
        way: A layout, and after a comma "unequal" for shares of other sizes, or "accumulate".

    Returns:
        Both proofs, and how far gradients are from those of the masked mean in one process.
    """
    layout, _, how = way.partition(", ")
    policies = [Pipeline("gpipe", microbatches=3)] if layout == "pp=2" else []
    spread = parallelize(small_net(), layout, *policies)
    x, y = texts()
    alone = small_net()
    loss_of(alone(x), y).backward()
    if layout != "pp=2":
        shares = [4, 2] if how == "unequal" else [3, 3]
        x, y = (both.split(shares)[dist.get_rank()] for both in (x, y))
    loss_fn = advised(y)
    proofs = [repr(spread.verify((x, y), fn)) for fn in (loss_of, loss_fn)]
    if how == "accumulate":
        for part in spread.accumulate(3):
            mine = slice(part, part + 1)
            spread.step(x[mine], y[mine], lambda out, y: loss_fn(out, y) / 3)
    else:
        spread.step(x, y, loss_fn)
    expected = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    found = [(n, p.grad) for n, p in spread.model.named_parameters() if p.grad is not None]
    off = [float((full_tensors.part_of(expected[n], g) - g).abs().max()) for n, g in found]
    return proofs[0], proofs[1], max(off)


def weighted(way: str) -> tuple[float, float]:
    """Train with `weight=` of kept tokens; return how far off the loss and the gradients are."""
    layout, _, how = way.partition(", ")
    x, y = texts()
    build = small_net
    policies: list[Any] = [Pipeline("gpipe", microbatches=3)] if layout == "pp=2" else []
    if layout == "cp=2":
        build, policies = (
            functools.partial(models.make, "gpt", torch.float64, seed=0),
            [ContextParallel(loss=True)],
        )
        x, y = models.batch("gpt", 0, 6, torch.float64)
        y[2:, : y.shape[1] // 2] = -100  # one part of each sequence keeps fewer
    y[{"none on rank 1": slice(3, 6), "a part without": slice(2)}.get(how, slice(0))] = -100
    spread, alone = parallelize(build(), layout, *policies), build()
    whole = loss_of(alone(x), y)
    whole.backward()
    is_cut = layout in ("pp=2", "cp=2")
    if not is_cut:
        shares = [4, 2] if how == "unequal" else [3, 3]
        x, y = (both.split(shares)[dist.get_rank()] for both in (x, y))
    loss = spread.step(x, y, loss_of, weight=y != -100)
    expected = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    found = [(n, p.grad) for n, p in spread.model.named_parameters() if p.grad is not None]
    parts = [(full_tensors.part_of(expected[n], g), torch_hooks.local_part(g)) for n, g in found]
    off = max(float((part - own).abs().max()) for part, own in parts if own.numel())
    if loss is None:
        return 0.0, off
    mean = float(loss) if is_cut else mean_over(float(loss), int((y != -100).sum()))
    return abs(mean - float(whole.detach())), off


def ragged() -> str:
    """Prove with shares of other lengths, which do not go into one piece."""
    x, y = texts()
    length = 6 - dist.get_rank()
    return parallelize(small_net(), "ddp").verify((x[:, :length], y[:, :length]), loss_of).verdict


WEIGHTED = [
    *("ddp", "ddp, unequal", "ddp, none on rank 1", "zero3, unequal", "zero3, none on rank 1"),
    *("zero1", "pp=2", "pp=2, a part without", "cp=2"),
]
WAYS = ["ddp", "ddp, unequal", "ddp, accumulate", "pp=2"]


def on_two_ranks() -> dict[str, Any]:
    """One group for all that two ranks prove."""
    f32, f64 = torch.float32, torch.float64
    right: list[tuple[Any, ...]] = [
        ("small", "zero2", f64),
        ("conv", "zero3", f32),
        ("conv", "pp=2", f32),
        ("dropping", "zero3", f32),
        ("dropping", "tp=2", f32),
        ("gpt", "tp=2", f64, TensorParallel(sequence=True, loss=True)),
        ("small", "ddp", torch.bfloat16),
        ("conv", "ddp", f32, Precision("bf16")),
        ("untied", "zero3", f32, Precision("bf16", reduce="bf16")),
        ("untied", "tp=2", f32, Precision("fp16")),
        ("untied", "pp=2", f32, Precision("fp16")),
        ("untied", "ddp", f32, Precision("fp32", reduce="fp16")),
    ]
    return {
        "right": {f"{name} {layout}": proof_of(name, layout, *r) for name, layout, *r in right},
        "planted": planted_bugs(),
        "refused": refused(),
        "unequal": unequal_parts("ddp"),
        "alone": rank_1_alone(),
        "asked": asked(),
        "compressed": {method: compressed(method) for method in ("bf16", "powersgd")},
        "masked": {way: masked(way) for way in WAYS},
        "weighted": {way: weighted(way) for way in WEIGHTED},
        "ragged": ragged(),
        "kept": {(lay, name): is_left_as_it_was(lay, name) for lay, name in KEPT},
    }


KEPT = [("ddp", "small"), ("zero3", "conv")]
