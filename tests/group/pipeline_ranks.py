"""What the ranks run in test_pipeline: parity with one process that sums the same micro-batches."""

# B batch, T sequence, D model width, V vocabulary

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, reduce
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from nbdist.engine.compat import torch_pipeline
from nbdist.engine.data.order.shards import data_shard
from nbdist.engine.layout import wrapped
from nbdist.engine.layout.axes.pp.schedule_runner import ScheduleRunner
from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.policies.efficiency import ActivationCheckpoint, Precision
from nbdist.engine.layout.policies.policies import Pipeline
from nbdist.shared.errors import LayoutError
from tests.group import models
from tests.group.layout_ranks import whole
from tests.group.tensor_parallel_ranks import Block, llama

V, T, D = 36, 12, 32
STEPS, GLOBAL_BATCH, MICRO = 3, 16, 4


class GPT(nn.Module):
    """Four blocks; positions are a parameter of the model itself, rotary-like scales a keyword."""

    def __init__(self, blocks: int = 4, block: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.position = nn.Parameter(torch.randn(T, D) / 10)
        self.blocks = nn.ModuleList((block or Block)() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.token(x_BT) + self.position[: x_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class Tied(GPT):
    """One weight of the first stage and of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.token.weight


class Sharing(Tied):
    """And one that every block has."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            assert isinstance(block, Block)
            block.norm_1.weight = self.norm.weight


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": GPT,
    "tied": Tied,
    "sharing": Sharing,
    "conv": models.ConvNet,
    "llama": llama,
    "mlp": lambda: nn.Sequential(*[nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(4)]),
}


def make(name: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().to(dtype)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT()


def runner_of(spread: Layout) -> ScheduleRunner:
    assert spread.pipeline is not None
    return spread.pipeline.runner


def batch(
    name: str, step: int, dtype: torch.dtype, size: int = GLOBAL_BATCH
) -> tuple[Tensor, Tensor]:
    if name == "conv":
        return models.batch("conv", step, size, dtype)
    random = torch.Generator().manual_seed(1000 + step)
    if name == "mlp":
        x, y = (torch.randn(size, D, generator=random, dtype=dtype) for _ in range(2))
        return x, y
    x_BT = torch.randint(V, (size, T), generator=random)
    return x_BT, (x_BT * 7 + 3) % V


Call = Callable[[nn.Module, Tensor], Any]


def plainly(model: nn.Module, x: Tensor) -> Any:
    return model(x)


def loss_of(out: Any, y: Tensor) -> Tensor:
    if y.is_floating_point():
        return F.mse_loss(out, y)
    logits = out.logits if hasattr(out, "logits") else out
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def one_process(
    name: str,
    dtype: torch.dtype,
    shares: int,
    max_norm: float | None,
    call: Call = plainly,
    scale: bool = False,
) -> tuple[list[list[float]], dict[str, Tensor], list[float]]:
    """Train as one process does that sums the same micro-batches.

    Returns the losses of each share, the final state, and the norms. Running statistics follow the
    first share.
    """
    model = make(name, dtype)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=scale)
    losses, norms = [], []
    for step in range(STEPS):
        x, y = batch(name, step, dtype)
        of_step, kept = [], list[Tensor]()
        for x_share, y_share in zip(x.chunk(shares), y.chunk(shares), strict=True):
            parts = zip(x_share.chunk(MICRO), y_share.chunk(MICRO), strict=True)
            of_share = []
            for x_part, y_part in parts:
                loss = loss_of(call(model, x_part), y_part)
                scaler.scale(loss / (MICRO * shares)).backward()
                of_share.append(loss.detach())
            kept = kept or [buffer.clone() for buffer in model.buffers()]
            of_step.append(float(torch.stack(of_share).mean()))
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.copy_(value)
        if max_norm is not None:
            scaler.unscale_(opt)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        losses.append(of_step)
    return losses, {n: t.detach().clone() for n, t in model.state_dict().items()}, norms


def train(
    name: str, dtype: torch.dtype, layout: str, policies: tuple[Any, ...], max_norm: float | None
) -> tuple[list[float | None], dict[str, Tensor], list[float], Layout]:
    """Train this rank's part; every rank begins with other weights, of which rank 0's count."""
    model = make(name, dtype, seed=dist.get_rank())
    spread = parallelize(model, layout, *policies)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shard = data_shard()
    losses, norms = list[float | None](), []
    for step in range(STEPS):
        x, y = (t.chunk(shard.count)[shard.index] for t in batch(name, step, dtype))
        loss = spread.step(x, y, loss_of)
        if max_norm is not None:
            norms.append(float(spread.clip_grad_norm_(max_norm)))
        spread.scaler.step(opt)
        spread.scaler.update()
        opt.zero_grad()
        losses.append(None if loss is None else float(loss))
    return losses, {n: whole(t) for n, t in model.state_dict().items()}, norms, spread


def parity(
    name: str,
    dtypes: list[torch.dtype],
    cases: list[tuple[str, tuple[Any, ...]]],
    max_norm: float | None,
) -> list[dict[str, Any]]:
    """Return, for each dtype and case, what differs from one process, and what the rank holds."""
    found = []
    alone = cache(one_process)
    for dtype in dtypes:
        for layout, policies in cases:
            mine, final, norms, spread = train(name, dtype, layout, policies, max_norm)
            shard = data_shard()
            losses, state, their_norms = alone(name, dtype, shard.count, max_norm)
            theirs = [of_step[shard.index] for of_step in losses]
            pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if a is not None]
            found.append(
                {
                    "losses": max((abs(a - b) for a, b in pairs), default=None),
                    "state": max(
                        float((final[n].double() - state[n].double()).abs().max()) for n in final
                    ),
                    "norms": max(
                        (abs(a - b) for a, b in zip(norms, their_norms, strict=True)), default=0.0
                    ),
                    "names": sorted(final),
                    "all": sorted(state),
                    "has loss": spread.pipeline is not None and runner_of(spread).has_loss,
                }
            )
    return found


# ---- Low precision -------------------------------------------------------------------------------


def autocast(dtype: torch.dtype) -> Call:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            out: Tensor = model(x)
        return out.float()

    return call


def in_low_parameters(dtype: torch.dtype) -> Call:
    """The whole model in `dtype`, gradients added up in the parameters' own: FSDP2's way."""

    def call(model: nn.Module, x: Tensor) -> Tensor:
        low = {name: p.to(dtype) for name, p in model.named_parameters()}
        out: Tensor = functional_call(model, low, (x,))
        return out.float()

    return call


def low(cases: list[tuple[str, str, tuple[Any, ...]]]) -> list[dict[str, Any]]:
    """Return how far a case with a `Precision` is from one process that computes so, and in full.

    And in which dtypes ranks have sent to each other, where they were told to.
    """
    found = []
    alone = cache(one_process)
    for name, layout, policies in cases:
        chosen = next(policy for policy in policies if isinstance(policy, Precision))
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[
            chosen.compute
        ]
        with sent_by_stages() as sent:
            mine, final, norms, spread = train(name, torch.float32, layout, policies, 0.5)
        shard = data_shard()
        calls = call_of(dtype, has_units=spread.shape.fsdp > 1)
        same = alone(name, torch.float32, shard.count, 0.5, calls, chosen.needs_scaler)
        full = alone(name, torch.float32, shard.count, 0.5)
        losses = [of_step[shard.index] for of_step in same[0]]
        pairs = [(a, b) for a, b in zip(mine, losses, strict=True) if a is not None]
        sent_before = runner_of(spread).plan.sent.values()
        found.append(
            {
                "state": furthest(final, same[1]),
                "losses": max((abs(a - b) for a, b in pairs), default=0.0),
                "norms": max(abs(a - b) / b for a, b in zip(norms, same[2], strict=True)),
                "floor": furthest(same[1], full[1]),
                "cuts sums": spread.shape.tp > 1,
                "sent": sent,
                "told": {str(one.spec.dtype) for crossings in sent_before for one in crossings},
            }
        )
    return found


@cache
def call_of(dtype: torch.dtype, *, has_units: bool) -> Call:
    if dtype is torch.float32:
        return plainly
    return in_low_parameters(dtype) if has_units else autocast(dtype)


@contextmanager
def sent_by_stages() -> Iterator[set[str]]:
    """Note the dtypes of the hidden states, and their gradients, that go from rank to rank."""
    sent: set[str] = set()
    native = dist.isend

    def noting(tensor: Tensor, *args: Any, **keywords: Any) -> Any:
        if tensor.is_floating_point():
            sent.add(str(tensor.dtype))
        return native(tensor, *args, **keywords)

    dist.isend = dist.distributed_c10d.isend = noting
    try:
        yield sent
    finally:
        dist.isend = dist.distributed_c10d.isend = native


def reduced(layouts: list[str]) -> list[tuple[float, float]]:
    """Return how far gradients averaged in bf16 are from rounded shares' sum, and from the mean."""
    x, y = batch("gpt", 0, torch.float32)
    alone = make("gpt", torch.float32)
    shares = []
    for x_share, y_share in zip(x.chunk(2), y.chunk(2), strict=True):
        alone.zero_grad()
        for x_part, y_part in zip(x_share.chunk(MICRO), y_share.chunk(MICRO), strict=True):
            (loss_of(alone(x_part), y_part) / MICRO).backward()
        shares.append({name: g.clone() for name, g in models.gradients(alone).items()})
    exact = {name: (shares[0][name] + shares[1][name]) / 2 for name in shares[0]}
    rounded = {n: reduce(add, ((s[n] / 2).bfloat16() for s in shares)).float() for n in exact}
    found = []
    for layout in layouts:
        model = make("gpt", torch.float32)
        policies = Pipeline(microbatches=MICRO), Precision("fp32", reduce="bf16")
        spread = parallelize(model, layout, *policies)
        shard = data_shard()
        spread.step(x.chunk(2)[shard.index], y.chunk(2)[shard.index], loss_of)
        mine = gradients(model)
        found.append((furthest(mine, rounded), furthest(mine, exact)))
    return found


def overflows() -> dict[str, list[float]]:
    """One rank alone finds an infinite gradient; and one whose stage is not trained finds none.

    Returns scales after each step, and how far each step changed this rank's part.
    """
    found = {}
    for case in ("all trained", "first stage frozen"):
        model = gpt()
        if case != "all trained":
            for part in (model.token, *model.blocks[:2]):
                part.requires_grad_(False)
            model.position.requires_grad_(False)
        spread = parallelize(model, "pp=2", Pipeline(microbatches=MICRO), Precision("fp16"))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        # A scale at which nothing else overflows.
        spread.scaler.scale(torch.zeros(()))
        spread.scaler.update(256.0)
        seen = []
        for breaks in (True, False):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            opt.zero_grad()
            spread.step(*batch("gpt", 0, torch.float32), loss_of)
            if breaks and runner_of(spread).has_loss:
                gradient = model.get_parameter("head.weight").grad
                assert gradient is not None
                gradient.fill_(float("inf"))
            spread.scaler.step(opt)
            spread.scaler.update()
            changed = furthest(before, {n: p.detach() for n, p in model.named_parameters()})
            seen += [spread.scaler.get_scale(), changed]
        found[case] = seen
    return found


def low_on_four_ranks(cases: Any, layouts: list[str]) -> tuple[Any, Any]:
    """Return both in one group of ranks."""
    return low(cases), reduced(layouts)


def low_on_two_ranks(cases: Any) -> tuple[Any, Any]:
    """Return both in one group of ranks."""
    return low(cases), overflows()


# ---- What else a step does -----------------------------------------------------------------------


class Checkpointed(GPT):
    """Computes its blocks anew in backward."""

    def forward(self, x_BT: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x_BTD = self.token(x_BT) + self.position[: x_BT.shape[1]]
        for block in self.blocks:
            x_BTD = checkpoint(block, x_BTD, use_reentrant=False)
        return self.head(self.norm(x_BTD))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def furthest(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def uses() -> dict[str, Any]:
    """Use one layout in every way; compare with one process, in fp64."""
    alone, model = make("gpt", torch.float64), make("gpt", torch.float64)
    policy = Pipeline(microbatches=MICRO, split="time")
    spread = parallelize(model, "pp=2", policy)
    x, y = batch("gpt", 0, torch.float64)
    seen: dict[str, Any] = {"again": parallelize(model, "pp=2", policy) is spread}
    seen["explained"] = repr(spread.explain())
    seen["stages"] = [(stage.rank, stage.blocks) for stage in spread.stages]
    texts: dict[str, str] = {}

    def refused(label: str, use: Callable[[], object]) -> None:
        try:
            use()
        except LayoutError as error:
            texts[label] = str(error)

    refused("uneven", lambda: spread.step(x[:6], y[:6], loss_of))
    stream = torch.get_rng_state()
    with torch.no_grad():
        loss = spread.step(x[:7], y[:7], loss_of)
        expected = loss_of(alone(x[:7]), y[:7])
    seen["evaluated"] = None if loss is None else abs(float(loss - expected))
    seen["gradients after"] = len(gradients(model))
    seen["stream went on"] = not torch.equal(stream, torch.get_rng_state())
    for part in spread.accumulate(2):
        spread.step(x.chunk(2)[part], y.chunk(2)[part], lambda o, t: loss_of(o, t) / 2)
    loss_of(alone(x), y).backward()
    seen["accumulated"] = furthest(gradients(model), gradients(alone))
    seen["clipped"] = clips_by_torch(model, refused)
    refused("called", lambda: model(x))
    refused("smaller last", lambda: spread.step(x[:6], y[:6], loss_of))
    seen["frozen"] = trains_with_a_frozen_stage()
    return {**seen, **texts}


def clips_by_torch(
    model: nn.Module, refused: Callable[[str, Callable[[], object]], None]
) -> tuple[bool, float]:
    """Return whether a pipeline's gradients stay as they are, and a plain model's norm."""
    before = gradients(model)
    wrapped.look_on()
    from torch.nn.utils.clip_grad import clip_grad_norm_

    refused("by torch", lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.3))
    refused("by its home's name", lambda: clip_grad_norm_(list(model.parameters())[:1], 0.3))
    plain = nn.Linear(1, 1, bias=False)
    plain.weight.grad = torch.full((1, 1), 3.0)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), max_norm=1.0)
    assert clip_grad_norm_(plain.weight, 9.0) <= 1.0
    return all(torch.equal(before[n], g) for n, g in gradients(model).items()), float(norm)


def trains_with_a_frozen_stage() -> tuple[int, float]:
    """Return how many parameters this rank's optimizer has, and how far a step moved them."""
    model = gpt()
    for part in (model.token, *model.blocks[:2]):
        part.requires_grad_(False)
    model.position.requires_grad_(False)
    spread = parallelize(model, "pp=2", Pipeline(microbatches=MICRO))
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    opt = spread.optimizer(torch.optim.AdamW, trained, lr=1e-2)
    spread.step(*batch("gpt", 0, torch.float32), loss_of)
    spread.clip_grad_norm_(1.0)
    opt.step()
    opt.zero_grad()
    pairs = zip(trained, before, strict=True)
    return len(trained), max((float((a - b).abs().max()) for a, b in pairs), default=0.0)


def with_checkpoints() -> float:
    """Return how far gradients are from those of one process."""
    torch.manual_seed(0)
    model = Checkpointed().double()
    alone = make("gpt", torch.float64)
    spread = parallelize(model, "pp=2", Pipeline(microbatches=MICRO))
    x, y = batch("gpt", 0, torch.float64)
    spread.step(x, y, loss_of)
    loss_of(alone(x), y).backward()
    return furthest(gradients(model), gradients(alone))


def uneven_shares(layouts: list[str]) -> list[float]:
    """Share six samples four to two; compare with one process on all, in fp64."""
    x, y = batch("gpt", 0, torch.float64, 6)
    alone = make("gpt", torch.float64)
    loss_of(alone(x), y).backward()
    found = []
    for layout in layouts:
        model = make("gpt", torch.float64)
        spread = parallelize(model, layout, Pipeline(microbatches=2))
        mine = slice(0, 4) if data_shard().index == 0 else slice(4, 6)
        spread.step(x[mine], y[mine], loss_of)
        found.append(furthest(gradients(model), gradients(alone)))
    return found


class Noisy(Block):
    """Notes what dropout in its place would draw."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append(torch.rand(()))
        return super().forward(x)


def _drawn_in_a_step(layout: str, *policies: object) -> tuple[list[float], Layout]:
    """Return what the block of this rank's stage draws in a step of two micro-batches."""
    torch.manual_seed(7)
    model = GPT(2, Noisy)
    spread = parallelize(model, layout, Pipeline("gpipe", microbatches=2), *policies)
    x, y = batch("gpt", 0, torch.float32)
    block = model.blocks[runner_of(spread).rank]
    assert isinstance(block, Noisy)
    block.drawn.clear()
    spread.step(x, y, loss_of)
    return [float(number) for number in block.drawn], spread


def draws_of_dropout() -> list[float]:
    """Return what a step drops in the first block of this rank's stage, and what the cell draws."""
    drawn, _ = _drawn_in_a_step("pp=2")
    return [*drawn, float(torch.rand(()))]


def draws_again(layout: str) -> tuple[list[float], list[float], float, str]:
    """Return what a block draws, and draws again; what the cell does; and the layout in words."""
    drawn, spread = _drawn_in_a_step(layout, ActivationCheckpoint())
    return drawn[:2], drawn[2:], float(torch.rand(())), repr(spread.explain())


# ---- Wrong use -----------------------------------------------------------------------------------


class Skipping(GPT):
    """Adds the embedding to what the last block gets."""

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = first = self.token(x_BT)
        for block in self.blocks[:-1]:
            x_BTD = block(x_BTD)
        return self.head(self.norm(self.blocks[-1](x_BTD) + first))


class AddingOutside(GPT):
    """Adds what a block gets to what it returns."""

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.token(x_BT)
        for block in self.blocks:
            x_BTD = x_BTD + block(x_BTD)
        return self.head(self.norm(x_BTD))


class Odd(Block):
    """Is called with token ids first."""

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]  # on purpose
        return super().forward(x)


class CalledOddly(GPT):
    def __init__(self) -> None:
        super().__init__(block=Odd)

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.token(x_BT)
        for block in self.blocks:
            x_BTD = block(x_BT, x_BTD)
        return self.head(self.norm(x_BTD))


class Aside(Block):
    """Keeps a loss beside its output."""

    def forward(self, x: Tensor) -> Tensor:
        self.aside = x.pow(2).mean()
        return super().forward(x)


class KeptAside(GPT):
    """Adds up what its blocks have kept, behind the last."""

    def __init__(self) -> None:
        super().__init__(block=Aside)

    def forward(self, x_BT: Tensor) -> Tensor:
        made, blocks = super().forward(x_BT), list[Any](self.blocks)
        return made + torch.stack([block.aside for block in blocks]).sum()


def refusals() -> dict[str, str]:
    """Return the text of each wrong use; the model must stay as it was, so that ddp still works."""
    texts = {}

    def refused(label: str, model: nn.Module, *policies: object, **words: Any) -> None:
        forwards = ["forward" in vars(module) for module in model.modules()]
        names = list(model.state_dict())
        try:
            parallelize(model, "pp=2", Pipeline(**words), *policies)
            texts[label] = "accepted"
        except LayoutError as error:
            texts[label] = str(error)
        assert forwards == ["forward" in vars(module) for module in model.modules()]
        assert not any(m._forward_pre_hooks for m in model.modules())
        assert names == list(model.state_dict())

    refused("shared in halves", Sharing(), schedule="zero-bubble")
    refused("kept aside", KeptAside())
    refused("few blocks", GPT(2), schedule="interleaved")
    refused("no blocks", nn.Linear(4, 4))
    refused("few micro-batches", GPT(), microbatches=1)
    refused("rounds", GPT(), schedule="interleaved", microbatches=5)
    refused("no block", GPT(), split=["blocks.0", "blocks.9"])
    refused("wrong count", GPT(), split=["blocks.0"])
    refused("wrong begin", GPT(), split=[1, 2])
    refused("schedule", GPT(), schedule="2f2b")
    refused("split", GPT(), split="size")
    refused("example", GPT(), example=torch.zeros(1, T + 1, dtype=torch.int64))
    again = ActivationCheckpoint(selective=True)
    refused("halves", GPT(), again, schedule="zero-bubble")
    kept = GPT()
    opt = torch.optim.SGD(kept.parameters(), lr=0.1)
    refused("old optimizer", kept)
    del opt
    aside = KeptAside()
    refused("then ddp", aside)
    assert parallelize(aside, "ddp").name == "ddp"
    return texts


def evaluations(schedules: list[str]) -> list[float | None]:
    """Return how far losses without gradients are from one process's, for batches of any size."""
    alone, found = make("gpt", torch.float64), []
    x, y = batch("gpt", 0, torch.float64)
    for schedule in schedules:
        spread = parallelize(make("gpt", torch.float64), "pp=2", Pipeline(schedule, MICRO))
        for size in (7, 6, 16):
            with torch.no_grad():
                loss = spread.step(x[:size], y[:size], loss_of)
                expected = loss_of(alone(x[:size]), y[:size])
            found.append(None if loss is None else abs(float(loss - expected)))
    return found


def received(stage: Any) -> list[Any]:
    """Return what torch receives micro-batches into, which a stage keeps."""
    tables = (stage.args_recv_info, stage.grad_recv_info)
    return [info for table in tables for row in table.values() for info in row or ()]


def held_of_a_batch(schedules: list[str]) -> list[int]:
    """Return how many hidden states live after a step, and after an evaluation."""
    found = []
    x, y = batch("gpt", 0, torch.float32)
    for schedule in schedules:
        spread = parallelize(make("gpt", torch.float32), "pp=2", Pipeline(schedule, MICRO))
        for trains in (True, False):
            with torch.set_grad_enabled(trains):
                spread.step(x, y, loss_of)
            gc.collect()
            infos = (i for stage in torch_pipeline.live_pipelines()[1] for i in received(stage))
            kept = {id(info.buffer) for info in infos if getattr(info, "buffer", None) is not None}
            living = [o for o in gc.get_objects() if isinstance(o, Tensor) and id(o) not in kept]
            found.append(sum(o.ndim == 3 and o.shape[1:] == (T, D) for o in living))
    return found
