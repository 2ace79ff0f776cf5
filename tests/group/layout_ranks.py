"""What the ranks run in test_layouts: parity with one process on the same split, and wrong use."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel

from nbdist.engine.compat import torch_modules
from nbdist.engine.layout import parallelize as spreading
from nbdist.engine.layout.layout import Layout, layout_of
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.tap import tap
from nbdist.shared import packed
from nbdist.shared.errors import LayoutError
from tests.group import models

STEPS, GLOBAL_BATCH = 5, 16


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor behind a shard, as a copy."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in model.state_dict().items()}


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the largest difference between two states with the same names."""
    assert list(a) == list(b), "names changed"
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def one_process(name: str, dtype: torch.dtype, parts: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train as one process does on the same split: `parts` micro-batches a step.

    Running statistics follow the first part alone, as under DDP they follow rank 0.
    """
    model = models.make(name, dtype)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        x, y = models.batch(name, step, GLOBAL_BATCH, dtype)
        kept: list[Tensor] = []
        for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = models.loss_of(name, model(x_part), y_part)
            (loss / parts).backward()
            kept = kept or [buffer.clone() for buffer in model.buffers()]
            losses.append(loss.item())
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.copy_(value)
        opt.step()
        opt.zero_grad()
    return losses, state_of(model)


def train(
    name: str, dtype: torch.dtype, layout: str, seed: int
) -> tuple[list[float], dict[str, Tensor], Layout]:
    """Train this rank's part under `layout`, from weights that depend on `seed`."""
    model = models.make(name, dtype, seed)
    spread = parallelize(model, layout)
    opt = spread.optimizer(torch.optim.AdamW, lr=1e-3)
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(STEPS):
        x, y = models.batch(name, step, GLOBAL_BATCH, dtype)
        loss = models.loss_of(name, model(x.chunk(world)[rank]), y.chunk(world)[rank])
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, state_of(model), spread


def parity(name: str, layouts: list[str], dtype_name: str) -> dict[str, tuple[float, float]]:
    """Return, for each layout, the differences of losses and of the final state."""
    found = {}
    rank, world = dist.get_rank(), dist.get_world_size()
    dtype: torch.dtype = getattr(torch, dtype_name)
    losses, state = one_process(name, dtype, world)
    for layout in layouts:
        # Every rank begins with other weights: rank 0's count.
        mine, final, _ = train(name, dtype, layout, seed=rank)
        in_losses = max(abs(a - b) for a, b in zip(mine, losses[rank::world], strict=True))
        found[layout] = (in_losses, difference(final, state))
    return found


def looks_like_the_users_model(layout: str) -> dict[str, Any]:
    model = models.make("conv", torch.float32)
    names = [name for name, _ in model.named_parameters()]
    facts: dict[str, str] = {}
    spreading.here.report = facts.update
    spread = parallelize(model, layout)
    return {
        "same names": [name for name, _ in model.named_parameters()] == names,
        "same class": isinstance(model, models.ConvNet),
        "same object": spread.model is model,
        "again": parallelize(model, layout) is spread,
        "facts": facts,
        "repr": repr(spread),
        "explained": repr(spread.explain()),
        "blocks": spread.blocks,
        "held": sum(
            (p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters()
        ),
        "count": spread.size.parameters,
        "axes": spread.mesh.mesh_dim_names,
    }


def warnings_of_a_step(layout: str) -> list[str]:
    """Return what torch warns of, in a step of a model whose output is a view."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    parallelize(model, layout)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(2, 3, 4)).sum().backward()
    return [str(warning.message) for warning in caught]


def forgets_a_dropped_model(layout: str) -> int:
    dropped: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    for _ in range(2):
        model = models.make("gpt", torch.float32)
        parallelize(model, layout)
        dropped.add(model)
        x, y = models.batch("gpt", 0, 2, torch.float32)
        models.loss_of("gpt", model(x), y).backward()
        del model
    gc.collect()
    return len(dropped)


def evaluates_alone() -> list[float]:
    """Rank 0 alone looks at the output of a model with batch norm, in mid-training."""
    model = models.make("conv", torch.float32)
    parallelize(model, "ddp")
    x, y = models.batch("conv", dist.get_rank(), 4, torch.float32)
    seen = []
    for _ in range(2):
        if dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                seen.append(float(model(x).sum()))
            model.train()
        models.loss_of("conv", model(x), y).backward()
    return seen


class Recurrent(nn.Module):
    """Weights that a list knows as well, running statistics, and a buffer that comes late."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.norm = nn.LSTM(3, 4, batch_first=True), nn.BatchNorm1d(4)
        self.temperature = 1.0
        self.register_buffer("last", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.memory(x)[0][:, -1]) * self.temperature
        if not self.training:
            self.last = y.detach()
        return y


def averages_weights(layout: str, name: str) -> dict[str, bool]:
    """Average the weights of a model as it trains, and look at copies of it."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = Recurrent() if name == "lstm" else models.make(name, torch.float32)
    kind, before = type(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    spread = parallelize(model, layout)
    opt = spread.optimizer(torch.optim.SGD, lr=0.1)
    average = AveragedModel(model, avg_fn=lambda old, new, _: old * 0.5 + new * 0.5)
    started = {n: p.detach().clone() for n, p in average.module.named_parameters()}
    by_hand: dict[str, Tensor] = {}
    for step in range(3):
        part, parts = spread.shape.data_part(rank)
        x = torch.randn(4, 5, 3)
        if name != "lstm":
            x, _ = models.batch(name, step * parts + part, 4, torch.float32)
        spread.step(x, None, lambda out, _: out.pow(2).mean())
        opt.step()
        opt.zero_grad()
        average.update_parameters(model)
        for key, p in model.named_parameters():
            old = by_hand.get(key, p.detach())
            by_hand[key] = old * 0.5 + p.detach() * 0.5
    model.eval()
    vars(model)["temperature"] = 2.0
    with torch.no_grad():
        live = model(x)
    both: dict[str, Any] = copy.deepcopy({"model": model, "parts": list(model.modules())})
    plain = both["model"]
    buffers = [torch.equal(b, plain.get_buffer(key)) for key, b in model.named_buffers()]
    with torch.no_grad():
        # Of rank 0 alone: a collective would wait for the other one.
        alone = plain(x) if rank == 0 else None
    own = {id(p) for p in model.parameters()}
    return {
        "begins where the model does": all(torch.equal(started[n], before[n]) for n in before),
        "averages": all(torch.equal(p, by_hand[n]) for n, p in average.module.named_parameters()),
        "is plain": type(plain) is kind
        and layout_of(plain) is None
        and not vars(plain).keys() & {"forward", "__deepcopy__"},
        "has no hooks": not any(m._forward_pre_hooks or m._forward_hooks for m in plain.modules()),
        "computes the same": alone is None or torch.allclose(alone, live, atol=1e-6),
        "has the state": difference(plain.state_dict(), dict(model.state_dict())) == 0,
        "has its buffers": all(buffers),
        "has its order": list(plain.state_dict()) == list(model.state_dict()),
        "shares nothing": not any(id(p) in own for p in plain.parameters()),
        "keeps ties": len(list(plain.parameters())) == len(list(model.parameters())),
        "has its modes": not any(m.training for m in plain.modules())
        and vars(plain)["temperature"] == 2.0,
        "is one copy": list(plain.modules()) == both["parts"],
        "can be spread": parallelize(plain, "zero3").name == "zero3",
        "leaves the model": layout_of(model) is spread and model(x) is not None,
    }


def refuses_copies(layout: str) -> str:
    """Return what a copy of a model of which ranks hold parts says."""
    model = models.make("gpt", torch.float32)
    parallelize(model, layout)
    try:
        copy.deepcopy(model)
    except LayoutError as error:
        return str(error)
    return "a copy"


def calls_of(work: Callable[[], object]) -> list[Any]:
    """Return the collectives that `work` makes on this rank, each as the tap tells it."""
    tap.install("full")
    tap.begin_cell()
    work()
    calls = tap.take(1).calls
    assert calls is not None
    tap.set_level("off")
    return [calls.new[number] for number in calls.calls[:: len(packed.CALL)]]


def buffers_after_a_step(layout: str) -> list[Any]:
    model = models.make("conv", torch.float32)
    model.register_buffer("constant", torch.tensor(float(dist.get_rank())), persistent=False)
    parallelize(model, layout)
    model.get_buffer("constant").fill_(dist.get_rank())
    x, y = models.batch("conv", dist.get_rank(), 4, torch.float32)
    models.loss_of("conv", model(x), y).backward()
    return [buffer.tolist() for buffer in model.buffers()]


def buffers_of_every_kind() -> dict[str, bool]:
    """Return, by name, whether a buffer became rank 0's: of any dtype, large, and put in later."""
    rank = dist.get_rank()
    model = nn.Linear(2, 2)
    first = {
        "f32": torch.full((3,), 1.5),
        "f64": torch.full((2, 2), 1 / 3, dtype=torch.float64),
        "bf16": torch.full((5,), 0.1, dtype=torch.bfloat16),
        "count": torch.tensor(2**60 + 1),
        "flags": torch.tensor([True, False, True]),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "large": torch.arange(400_000.0),
    }
    for name, value in first.items():
        model.register_buffer(name, value.clone())
    parallelize(model, "ddp")

    def follows(of: nn.Module) -> dict[str, bool]:
        wanted = {name: buffer.clone() for name, buffer in of.named_buffers()}
        if rank:
            for buffer in of.buffers():
                buffer.zero_()
        of(torch.ones(1, 2)).sum().backward()
        return {name: torch.equal(b, wanted[name]) for name, b in of.named_buffers()}

    seen = follows(model)
    model.f32, model.flags = torch.full((4,), 1 / 7, dtype=torch.float64), torch.tensor([True])
    return seen | {f"{name}, later": is_alike for name, is_alike in follows(model).items()}


def hooked(through: str) -> tuple[int, list[float]]:
    """Count a hook's calls, with gradients sent as fp16."""
    calls = 0

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        nonlocal calls
        calls += 1
        return default_hooks.fp16_compress_hook(state, bucket)

    model = models.make("gpt", torch.float32)
    spread = parallelize(model, "ddp")
    (spread if through == "layout" else cast(DDP, model)).register_comm_hook(None, hook)
    x, y = models.batch("gpt", dist.get_rank(), 4, torch.float32)
    models.loss_of("gpt", model(x), y).backward()
    return calls, [float(gradient.sum()) for gradient in models.gradients(model).values()]


def gathers_without_synchronising() -> bool:
    """Accumulate with torch's own switch: no gradient is averaged until it is on again."""
    model = models.make("gpt", torch.float32)
    parallelize(model, "ddp")
    x, y = models.batch("gpt", dist.get_rank(), 4, torch.float32)
    models.synchronize(model, False)
    models.loss_of("gpt", model(x), y).backward()
    local = [gradient.clone() for gradient in models.gradients(model).values()]
    models.synchronize(model, True)
    models.loss_of("gpt", model(x), y).backward()
    both = list(models.gradients(model).values())
    everyone = [torch.empty_like(both[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, both[0])
    alone = [torch.empty_like(local[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(alone, local[0])
    return torch.equal(*everyone) and not torch.equal(*alone)


def shares_states() -> dict[str, Any]:
    """Step under zero1: the numbers of state on this rank, and what a plain optimizer says."""
    model = models.make("gpt", torch.float32)
    layout = parallelize(model, "zero1")
    x, y = models.batch("gpt", dist.get_rank(), 4, torch.float32)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    opt = layout.optimizer(torch.optim.AdamW, groups, lr=1e-3)
    models.loss_of("gpt", model(x), y).backward()
    said = []
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        try:
            plain.step()
        except LayoutError as error:
            said.append(str(error))
    before = state_of(model)
    opt.step()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    other.step()
    sharing: Any = opt  # torch's ZeroRedundancyOptimizer, whose import warns
    states = sharing.optim.state.values()
    return {
        "moments": sum(state["exp_avg"].numel() for state in states),
        "numbers": layout.size.parameters,
        "said": said,
        "moved": difference(before, state_of(model)) > 0,
        "sum": float(sum(p.sum() for p in model.parameters())),
        "explained": repr(layout.explain()),
        "kinds": [type(o).__name__ for o in (opt, layout_optimizer_of("ddp"))],
    }


def layout_optimizer_of(layout: str) -> torch.optim.Optimizer:
    model = models.make("gpt", torch.float32)
    return parallelize(model, layout).optimizer(torch.optim.AdamW, lr=1e-3)


def refusals() -> dict[str, str]:
    """Return the text of each wrong use; the model must be untouched, so that ddp still works."""
    texts = {}

    def refused(label: str, model: Any, layout: str, *policies: object) -> None:
        try:
            parallelize(model, layout, *policies)
        except LayoutError as error:
            texts[label] = str(error)

    plain = models.make("gpt", torch.float32)
    refused("unknown word", plain, "zeor3")
    refused("product", plain, "dp=3")
    refused("cp", models.make("conv", torch.float32), "cp=2")
    refused("policy", plain, "ddp", object())
    refused("no module", "plain", "ddp")
    opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    refused("optimizer before fsdp", plain, "zero3")
    parallelize(plain, "ddp")
    assert opt.param_groups
    refused("another layout", plain, "zero3")
    refused("a part", nn.Sequential(plain), "ddp")
    refused(
        "wrapped", nn.parallel.DistributedDataParallel(models.make("gpt", torch.float32)), "ddp"
    )
    scalar = nn.Linear(2, 2)
    scalar.gain = nn.Parameter(torch.tensor(1.0))
    refused("scalar", scalar, "zero3")
    refused("a list", nn.ModuleList([nn.Linear(2, 2)]), "zero3")
    refused("frozen", nn.Linear(2, 2).requires_grad_(False), "ddp")
    refused("meta", nn.Linear(2, 2, device="meta"), "zero3")
    refused("shapes", nn.Linear(2, 2 + dist.get_rank()), "ddp")
    refused("layouts", nn.Linear(2, 2), ["zero2", "zero3"][dist.get_rank()])
    sharded = models.make("gpt", torch.float32)
    spread = parallelize(sharded, "zero3")
    with suppress(LayoutError):
        spread.register_comm_hook(None, default_hooks.fp16_compress_hook)
        texts["hook"] = "accepted"
    return texts


def trains_after_a_stale_optimizer() -> str:
    """An optimizer that only a cycle keeps alive is no reason to refuse."""
    model = models.make("gpt", torch.float32)
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    opt.me = opt
    del opt
    return parallelize(model, "zero3").name


def self_test() -> list[str]:
    return torch_modules.check()


class Borrowing(nn.Module):
    """Ends, or begins, with a part of its first block, as diffusers' DiT does."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)
        )
        self.first = first

    def borrowed(self, x: Tensor) -> Tensor:
        return self.get_submodule("blocks.0.0")(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.borrowed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.first else self.borrowed(x)


def parts_called_outside(layout: str) -> tuple[float, float, list[str]]:
    """Train a model that calls a part of a block after it; return the loss of one process too."""
    torch.manual_seed(0)
    model = Borrowing(first=False).double()
    alone = copy.deepcopy(model)
    x = torch.randn(4, 8, dtype=torch.float64)
    parallelize(model, layout)
    losses = []
    for trained in (model, alone):
        opt = torch.optim.SGD(trained.parameters(), lr=0.5)
        for _ in range(4):
            loss = trained(x).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
        losses.append(loss.item())
    hooks = [
        name
        for name, module in model.named_modules()
        if any("outside_calls" in str(hook) for hook in module._forward_pre_hooks.values())
    ]
    return losses[0], losses[1], hooks


def part_called_before_its_block() -> str:
    model = Borrowing(first=True)
    parallelize(model, "zero3")
    try:
        model(torch.randn(4, 8))
    except LayoutError as error:
        return str(error)
    return ""


class Int8Tensor(Tensor):
    """Int8 numbers with a scale, of which a library has written little: as torchao's."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Self:
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], *_: object) -> "Int8Tensor":
        return cls(parts["numbers"], parts["scale"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as the one that does nothing
        cls, operator: Any, _types: Any, args: Any = (), _keywords: Any = None
    ) -> Any:
        if operator is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        raise NotImplementedError(f"{cls.__name__} has no {operator}")


class Adapted(nn.Module):
    """A quantized weight that stays as it is, and a small one beside it that is trained."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.randint(-100, 100, (8, 8), dtype=torch.int8)
        self.weight = nn.Parameter(Int8Tensor(numbers, torch.rand(8)), requires_grad=False)
        self.adapter = nn.Linear(8, 8)

    @property
    def quantized(self) -> Any:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        weight = self.quantized
        return x @ (weight.numbers * weight.scale) / 100 + self.adapter(x)


def quantized(layout: str, is_trained: bool = False) -> tuple[float, bool] | str:
    """Train beside a quantized weight; return how the loss changed, and if the weight did not."""
    torch.manual_seed(dist.get_rank())
    model = Adapted()
    model.quantized.requires_grad_(is_trained)
    before = model.quantized.numbers.clone()
    try:
        spread = parallelize(model, layout)
    except LayoutError as error:
        return str(error)
    optimizer = spread.optimizer(torch.optim.SGD, lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[-1] - losses[0], torch.equal(before, model.quantized.numbers)
