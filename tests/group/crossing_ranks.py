"""What the ranks run in test_crossings: models between whose stages several tensors go."""

# B batch, T sequence, D model width, V vocabulary, H heads, C channels

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from nbdist.engine.data.order.shards import data_shard
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.policies.policies import Pipeline
from nbdist.shared.errors import LayoutError
from tests.group.layout_ranks import calls_of, whole
from tests.group.pipeline_ranks import GPT, AddingOutside, CalledOddly, Skipping, furthest

V, T, D, H = 24, 6, 16, 2
BATCH, MICRO = 8, 4


class Layer(nn.Module):
    """Attention with a bias that the first layer of a stack makes, and all get; maybe across."""

    def __init__(self, *, makes_bias: bool, is_across: bool) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(D), nn.Linear(D, 3 * D)
        self.across = nn.Linear(2 * D, D) if is_across else None
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.near = nn.Embedding(2 * T, H) if makes_bias else None

    def forward(
        self, x_BTD: Tensor, mask: Tensor, bias: Tensor | None, encoded: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        b, t, _ = x_BTD.shape
        if bias is None:
            assert self.near is not None
            at = torch.arange(t)
            bias = self.near(at[:, None] - at + T).permute(2, 0, 1)[None] + mask
        q, k, v = self.inner(self.norm(x_BTD)).view(b, t, 3, H, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)
        x_BTD = x_BTD + found.reshape(b, t, -1)
        if self.across is not None:
            assert encoded is not None
            mean = encoded.mean(1, keepdim=True).expand_as(x_BTD)
            x_BTD = x_BTD + self.across(torch.cat([x_BTD, mean * encoded.std()], -1))
        return x_BTD + self.down(F.gelu(self.up(x_BTD))), bias


class Stack(nn.Module):
    def __init__(self, count: int, token: nn.Module, *, is_across: bool) -> None:
        super().__init__()
        self.token, self.norm = token, nn.LayerNorm(D)
        self.block = nn.ModuleList(
            Layer(makes_bias=i == 0, is_across=is_across) for i in range(count)
        )

    def forward(self, ids_BT: Tensor, encoded: Tensor | None = None) -> Tensor:
        x_BTD, bias = self.token(ids_BT), None
        mask = torch.zeros(T, T, dtype=x_BTD.dtype)
        if encoded is not None:
            mask = mask.masked_fill(torch.ones(T, T).triu(1) > 0, -1e9)
        for layer in self.block:
            x_BTD, bias = layer(x_BTD, mask, bias, encoded=encoded)
        return self.norm(x_BTD)


class Translator(nn.Module):
    """An encoder of two layers and a decoder of three; one embedding for both, and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.token: nn.Module = nn.Embedding(V, D)
        self.encoder = Stack(2, self.token, is_across=False)
        self.decoder = Stack(3, self.token, is_across=True)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.token.get_parameter("weight")

    def forward(self, x_BT: Tensor) -> dict[str, Tensor]:
        encoded = self.encoder(x_BT.flip(1))
        return {"logits": self.head(self.decoder(x_BT, encoded)), "encoded": encoded}


class Frozen(Translator):
    """Its encoder is not trained: what it sends has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.token = nn.Embedding(V, D)
        self.encoder.requires_grad_(False)


class Untied(Translator):
    """Its decoder has an embedding of its own, which no received tensor leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.decoder.token = nn.Identity(), nn.Embedding(V, D)
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


class Scale(nn.Module):
    """A step of a U-Net."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, stride, padding=1)
        self.time, self.norm = nn.Linear(D, after), nn.GroupNorm(1, after)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        made: Tensor = F.silu(self.norm(self.conv(x)) + self.time(time)[:, :, None, None])
        return made.mul_(2)  # in place


class UNet(nn.Module):
    """Down, up and across; what is known of the time is a sum between modules, for all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, D), nn.Linear(1, D)
        self.down = nn.ModuleList([Scale(3, 4), Scale(4, 6, 2), Scale(6, 8, 2)])
        self.up = nn.ModuleList([Scale(14, 6), Scale(10, 4), Scale(4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        moment = x.mean((1, 2, 3))[:, None]
        time = self.first(moment) + self.last(moment**2)
        skips = []
        for part in self.down:
            x = part(x, time)
            skips.append(x)
        x = skips.pop()
        for part in self.up:
            if skips:
                skip = skips.pop()
                x = torch.cat([F.interpolate(x, skip.shape[2:]), skip], 1)
            x = part(x, time)
        return x


class Factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.get_buffer("factor")


class Borrowing(GPT):
    """Uses a part of its first block once more behind the last, and looks at the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].factor = Factor()

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = first = self.token(x_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        with torch.no_grad():
            size = first.abs().mean()
        return self.head(self.norm(self.part(x_BTD) * (1 + size)))

    def part(self, x_BTD: Tensor) -> Tensor:
        first: Any = self.blocks[0]
        return first.factor(first.norm_1(x_BTD)).sin()


KINDS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(Translator, Frozen, Untied, UNet, Borrowing),
        *(Skipping, AddingOutside, CalledOddly),
    )
}


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind]().double()


def batch(kind: str) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    if kind == "UNet":
        x = torch.randn(BATCH, 3, 8, 8, generator=random, dtype=torch.float64)
        return x, x.flip(0)
    x = torch.randint(V, (BATCH, T), generator=random)
    return x, x * 5 % V


def loss_of(out: Any, y: Tensor) -> Tensor:
    if isinstance(out, dict):
        return loss_of(out["logits"], y) + out["encoded"].pow(2).mean() / 10
    if y.is_floating_point():
        return F.mse_loss(out, y)
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def parity(
    kind: str, layout: str, schedule: str, *policies: object
) -> tuple[float, float, set[str], set[str]]:
    """Return how far gradients and a loss in evaluation are from one process's.

    And the names of the gradients here, and there.
    """
    alone, (x, y) = make(kind), batch(kind)
    policy = Pipeline(schedule, microbatches=MICRO, example=x[:2])
    live = parallelize(make(kind), layout, policy, *policies)
    shard = data_shard()
    mine = [t.chunk(shard.count)[shard.index] for t in (x, y)]
    live.step(mine[0], mine[1], loss_of)
    parts = MICRO * shard.count
    for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
        (loss_of(alone(x_part), y_part) / parts).backward()
    its, theirs = gradients(live.model), gradients(alone)
    far = furthest(its, theirs)
    for model in (alone, live.model):
        model.eval()
    with torch.no_grad():
        loss = live.step(mine[0], mine[1], loss_of)
        pairs = zip(*(t.chunk(MICRO) for t in mine), strict=True)
        expected = torch.stack([loss_of(alone(a), b) for a, b in pairs]).mean()
    off = 0.0 if loss is None else abs(float(whole(loss) - expected))
    return far, off, set(its), set(theirs)


class Drawing(GPT):
    """Draws between its blocks, and uses that on both sides of each cut."""

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.token(x_BT)
        noise = torch.rand_like(x_BTD)
        for block in self.blocks:
            x_BTD = block(x_BTD) + noise
        return self.head(self.norm(x_BTD))


class Order(nn.Module):
    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.argsort(1)


class Counting(GPT):
    """What weights decide about tokens, as whole numbers, is used by all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.order = Order()

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.token(x_BT)
        places = self.order(x_BTD)
        for block in self.blocks:
            x_BTD = block(x_BTD).gather(1, places)
        return self.head(self.norm(x_BTD))


class InPlace(GPT):
    """Changes what a module has returned, which it uses behind the last block."""

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = first = self.token(x_BT)
        first += 1.0
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD + first))


class Kept:
    """An object that blocks share, and no module."""

    first: Tensor


class Keeping(nn.Module):
    def __init__(self, kept: Kept, is_first: bool) -> None:
        super().__init__()
        self.kept, self.is_first, self.layer = kept, is_first, nn.Linear(D, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = torch.tanh(self.layer(x_BTD))
        if self.is_first:
            self.kept.first = x_BTD
            return x_BTD
        return x_BTD + self.kept.first


class Sharing(nn.Sequential):
    """The first block leaves for the others, on an object, what it has made."""

    def __init__(self) -> None:
        kept = Kept()
        super().__init__(*(Keeping(kept, number == 0) for number in range(4)))


def refusals() -> dict[str, str]:
    """Return what is said of models of which something cannot be sent."""
    found = {}
    in_halves = Pipeline("zero-bubble", MICRO, example=batch("Untied")[0])
    for kind, policy in [
        *((kind, Pipeline(microbatches=MICRO)) for kind in (Drawing, Counting, InPlace, Sharing)),
        (Untied, in_halves),
    ]:
        try:
            parallelize(kind(), "pp=2", policy)
            found[kind.__name__] = "accepted"
        except LayoutError as error:
            found[kind.__name__] = str(error)
    return found


def traffic() -> tuple[float, float]:
    """Return the bytes of this rank's messages in a step, and those explained, on average."""
    x, y = batch("UNet")
    live = parallelize(make("UNet"), "pp=2", Pipeline(microbatches=MICRO, example=x[:2]))
    assert live.pipeline is not None
    live.step(x, y, loss_of)  # torch's stages agree on something in their first one
    calls = calls_of(lambda: live.step(x, y, loss_of))
    plan = live.pipeline.runner.plan
    sent = sum(call.bytes for call in calls if call.kind == "send")
    return sent, plan.sent_bytes * BATCH


def returned() -> list[float]:
    """Return how far a state is from the plain model's, and a step with the state loaded."""
    x, y = batch("Translator")
    alone, policy = make("Translator"), Pipeline(microbatches=MICRO, example=x[:2])
    live = parallelize(make("Translator"), "pp=2", policy)
    state = live.state_dict()
    zeros = make("Translator")
    with torch.no_grad():
        for parameter in zeros.parameters():
            parameter.zero_()
    again = parallelize(zeros, "pp=2", policy)
    again.load_from(live)
    one, other = live.step(x, y, loss_of), again.step(x, y, loss_of)
    expected = alone.state_dict() if dist.get_rank() == 0 else {}
    assert list(state) == list(expected)
    far = [float((state[name] - expected[name]).abs().max()) for name in state]
    return far if one is None or other is None else [*far, abs(float(one - other))]


def on_two_ranks(cases: list[tuple[Any, ...]]) -> Any:
    """One group for all that two ranks show."""
    return try_all(cases), refusals(), traffic(), returned()


def try_all(cases: list[tuple[Any, ...]]) -> list[Any]:
    """Return the parity of each case."""
    return [parity(*case) for case in cases]
