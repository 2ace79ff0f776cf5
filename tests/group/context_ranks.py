"""What the ranks run in test_context: models that cp can cut along the sequence, and some not."""

# B batch, T sequence, H heads, D model width, V vocabulary

from contextlib import nullcontext
from copy import deepcopy
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nbdist.engine.data.order.shards import data_shard
from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.policies.policies import ContextParallel, Pipeline, TensorParallel
from nbdist.shared import collectives
from nbdist.shared.errors import LayoutError
from tests.group import models, tensor_parallel_ranks
from tests.group.layout_ranks import calls_of, difference, state_of
from tests.group.tensor_parallel_ranks import (
    GPT,
    MLP,
    MODELS,
    STEPS,
    Attention,
    D,
    Dropping,
    H,
    V,
    batch,
    block_of,
    llama,
    loss_of,
    one_process,
)

Difference = tuple[float, float]  # of losses, and of the final state


class Rotary(nn.Module):
    """Blocks get tables of positions and a mask as keywords, as in transformers."""

    def __init__(self, key_heads: int = H) -> None:
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(RotaryBlock(key_heads) for _ in range(2))
        self.head = nn.Linear(D, V)

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.token(x_BT)
        angles_TF = torch.outer(torch.arange(x_BT.shape[1]), 0.5 ** torch.arange(D // H // 2))
        turns = torch.cat([angles_TF, angles_TF], -1).to(x_BTD.dtype)
        mask_TT = torch.ones(2 * [x_BT.shape[1]], dtype=torch.bool).tril().triu(-5)
        for block in self.blocks:
            x_BTD = block(x_BTD, turns=(turns.cos(), turns.sin()), mask=mask_TT)
        return self.head(x_BTD)


class RotaryBlock(nn.Module):
    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(D, D), nn.Linear(D, D)
        self.kv = nn.Linear(D, 2 * key_heads * D // H, bias=False)

    def forward(self, x_BTD: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        cos, sin = turns
        heads = [self.q(x_BTD), *self.kv(x_BTD).chunk(2, -1)]
        q, k, v = (h.unflatten(-1, (-1, D // H)).transpose(1, 2) for h in heads)
        q, k = (h * cos + torch.cat(h.chunk(2, -1)[::-1], -1) * sin for h in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return x_BTD + self.out(mixed.transpose(1, 2).flatten(2))


MADE: dict[str, Any] = {
    **MODELS,
    "masked": Rotary,
    "masked, 2 key heads": lambda: Rotary(2),
    "one key head": lambda: llama(heads=4, key_heads=1),
}


make = partial(tensor_parallel_ranks.make, made=MADE)


def train(
    name: str, dtype: torch.dtype, layout: str, policies: tuple[Any, ...]
) -> tuple[list[float], dict[str, Tensor], Layout]:
    """Train with a plain loop; every rank begins with other weights, of which rank 0's count."""
    model = make(name, dtype, seed=dist.get_rank())
    spread = parallelize(model, layout, *policies)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shard = data_shard()
    losses = []
    for step in range(STEPS):
        x, y = (t.chunk(shard.count)[shard.index] for t in batch(step))
        with loss_parallel() if spread.policies.tensor.loss else nullcontext():
            loss = loss_of(model(x), spread.own(y))
            loss.backward()
        spread.clip_grad_norm_(0.5)
        opt.step()
        opt.zero_grad()
        seen = loss.detach()
        if spread.policies.context.loss:
            seen = seen.full_tensor() if isinstance(seen, DTensor) else seen
            dist.all_reduce(seen, group=spread.mesh["cp"].get_group())
            seen /= spread.shape.cp
        losses.append(float(seen))
    return losses, state_of(model), spread


Case = tuple[str, str, tuple[Any, ...]]  # model, layout, policies


def parity(dtypes: list[str], cases: list[Case]) -> dict[tuple[str, str, str, str], Difference]:
    """Return the differences from one process, by case and dtype."""
    found = {}
    alone = cache(partial(one_process, max_norm=0.5, made=MADE))
    for dtype in (getattr(torch, word.removeprefix("torch.")) for word in dtypes):
        for name, layout, policies in cases:
            mine, final, spread = train(name, dtype, layout, policies)
            index, count = spread.shape.data_part(dist.get_rank())
            losses, state = alone(name, dtype, count)
            in_losses = max(abs(a - b) for a, b in zip(mine, losses[index::count], strict=True))
            found[name, layout, str(policies), str(dtype)] = (in_losses, difference(final, state))
    return found


def everything(cases: list[Case]) -> dict[str, Any]:
    """Return what two ranks see: one start of a group for all of it."""
    return {
        "parity": parity(["torch.float64"], cases),
        "bytes": {str(policy): sent_bytes(policy) for policy in (ULYSSES, GATHER, OWN)},
        "checkpointed": checkpointed(),
        "dropped": dropped(),
        "uses": uses(),
        "refusals": refusals(),
        "steps": steps(),
    }


ULYSSES, GATHER, OWN = ContextParallel(), ContextParallel("gather"), ContextParallel(loss=True)


def sent_bytes(policy: ContextParallel) -> tuple[float, float]:
    """Return bytes a rank sends in forward and backward, as the tap counts, and as explained."""
    model = make("masked, 2 key heads", torch.float32)
    spread = parallelize(model, "cp=2", policy)
    models.synchronize(model, False)  # what is left is cp's own
    x, y = batch(0)
    called = calls_of(lambda: loss_of(model(x), spread.own(y)).backward())
    sent = sum(collectives.sent_bytes(call.kind, call.bytes, 2, "gloo") for call in called)
    assert spread.context is not None
    return sent, spread.context.token_bytes * x.numel()


class Checkpointed(GPT):
    """Computes each block again in backward."""

    def forward(self, x_BT: Tensor) -> Tensor:
        x = self.token(x_BT) + self.position.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def checkpointed() -> dict[str, float]:
    """Return, by method, how far gradients are from those without checkpoints."""
    found = {}
    for policy in (ULYSSES, GATHER):
        gradients = []
        for kind in (GPT, Checkpointed):
            torch.manual_seed(0)
            model = kind(block_of(mlp=Dropping)).double()
            parallelize(model, "cp=2", policy)
            torch.manual_seed(7)
            x, y = batch(0)
            loss_of(model(x), y).backward()
            gradients.append(models.gradients(model))
        found[policy.method] = difference(*gradients)
    return found


class DropsFirst(GPT):
    """Drops embeddings, and what mlps make; keeps what it has dropped."""

    def forward(self, x_BT: Tensor) -> Tensor:
        self.embedded = F.dropout(self.token(x_BT), 0.5, self.training)
        x = self.embedded
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class KeepsDropped(MLP):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = F.dropout(torch.ones_like(x), 0.5, self.training)
        return super().forward(x) * self.kept


def dropped() -> dict[str, Any]:
    """Return what two forwards drop of embeddings and in blocks, the second one after a restore."""
    model = DropsFirst(block_of(mlp=KeepsDropped))
    parallelize(model, "cp=2")
    torch.manual_seed(3)
    x, _ = batch(0)
    state, seen = torch.get_rng_state(), []
    for restored in (True, False, True):
        if restored:
            torch.set_rng_state(state)
        model(x)
        seen.append(
            {
                "embeddings": (model.embedded == 0).tolist(),
                "blocks": [
                    m.kept.bool().tolist() for m in model.modules() if isinstance(m, KeepsDropped)
                ],
                "after it": float(torch.rand(())),
            }
        )
    return dict(zip(("first", "second", "again"), seen, strict=True))


def uses() -> dict[str, Any]:
    """Return how far evaluation, autocast and accumulation are from one process."""
    plain, model = make("gpt", torch.float32), make("gpt", torch.float32)
    spread = parallelize(model, "cp=2")
    x, y = batch(0)

    def gradients(of: nn.Module) -> dict[str, Tensor]:
        taken = {name: grad.clone() for name, grad in models.gradients(of).items()}
        of.zero_grad()
        return taken

    with torch.no_grad():
        evaluated = float((model.eval()(x) - plain(x)).abs().max())
    model.train()
    stream = torch.get_rng_state()
    model(x)
    moves = not torch.equal(torch.get_rng_state(), stream)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, alone = model(x), plain(x)
        loss_of(mixed, y).backward()
        loss_of(alone, y).backward()
    in_autocast = difference(gradients(model), gradients(plain))
    for part in spread.accumulate(2):
        (loss_of(model(x.chunk(2)[part]), y.chunk(2)[part]) / 2).backward()
    loss_of(plain(x), y).backward()
    return {
        "evaluated": evaluated,
        "moves the stream": moves,
        "autocast": float((mixed - alone).detach().float().abs().max()),
        "autocast gradients": in_autocast,
        "accumulated": difference(gradients(model), gradients(plain)),
        "explained": repr(spread.explain()),
        "samples": spread.shape.data_part(dist.get_rank()),
    }


def steps() -> dict[str, float]:
    """Return by policy how far `layout.step` is from one process: of the loss, of gradients."""
    found = {}
    x, y = batch(0)
    plain = make("gpt", torch.float64)
    loss = loss_of(plain(x), y)
    loss.backward()
    theirs = models.gradients(plain)
    for policy in (ULYSSES, OWN):
        model = make("gpt", torch.float64)
        seen = parallelize(model, "cp=2", policy).step(x, y, loss_of)
        mine = models.gradients(model)
        assert seen is not None
        found[str(policy)] = max(abs(float(seen - loss.detach())), difference(mine, theirs))
    return found


class OwnSoftmax(Attention):
    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            p(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        weights = (q @ k.transpose(-1, -2) / self.head_dim**0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class PositionsInside(Attention):
    """Counts its tokens from zero."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return super().forward(x_BTD + torch.arange(x_BTD.shape[1])[:, None] / 8)


class Convolved(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(D, D, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mix(x.transpose(1, 2)).transpose(1, 2))


class Normed(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2))


class MaskInside(Attention):
    """Makes a mask of its own tokens."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, _ = x_BTD.shape
        q, k, v = (
            p(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        mask = torch.ones(t, t, dtype=torch.bool).tril()
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(b, t, -1))


def refusals() -> dict[str, str]:
    """Return the text of each wrong use; the model must stay as it was."""
    texts = {}

    def refused(label: str, model: nn.Module, *policies: Any, layout: str = "cp=2") -> None:
        try:
            spread = parallelize(model, layout, *policies)
        except LayoutError as error:
            texts[label] = str(error)
            assert not any("forward" in vars(module) for module in model.modules())
            parallelize(model, "ddp")
        else:
            texts[label] = f"accepted: {spread.context}"

    refused("heads", GPT(block_of(lambda: Attention(1))))
    refused("one head gathered", GPT(block_of(lambda: Attention(1))), GATHER)
    refused("key heads", Rotary(1))
    refused("own softmax", GPT(block_of(OwnSoftmax)))
    refused("positions inside", GPT(block_of(PositionsInside)))
    refused("convolution", GPT(block_of(mlp=Convolved)))
    refused("batch norm", GPT(block_of(mlp=Normed)))
    refused("mask inside", GPT(block_of(MaskInside)))
    refused("no blocks", nn.Sequential(nn.Embedding(V, D), nn.Linear(D, V)))
    refused("no cp", GPT(), GATHER, layout="ddp")
    refused("example", Rotary(), ContextParallel(example=torch.zeros(2, 3, dtype=torch.int64)))
    model = Rotary()
    parallelize(model, "cp=2")
    try:
        model(torch.zeros(2, 7, dtype=torch.int64))
    except LayoutError as error:
        texts["odd length"] = str(error)
    return texts


class TwoLists(GPT):
    """Blocks of two lists, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.ModuleList(block_of()() for _ in range(2))

    def forward(self, x_BT: Tensor) -> Tensor:
        x = self.token(x_BT) + self.position.weight
        for block in (*self.blocks, *self.late):
            x = block(x)
        return self.head(self.norm(x))


def of_two_lists() -> dict[str, str | float]:
    """Return how far gradients are from one process's, or why they are refused."""
    found: dict[str, str | float] = {}
    layouts = {"dp=2 cp=2": (), "cp=2 tp=2": (TensorParallel(sequence=True),), "pp=2 cp=2": ()}
    for layout, policies in layouts.items():
        torch.manual_seed(0)
        alone = TwoLists().double()
        model = deepcopy(alone)
        x, y = batch(0)
        try:
            parallelize(model, layout, *policies)
        except LayoutError as error:
            found[layout] = str(error)
            continue
        loss_of(model(x), y).backward()
        loss_of(alone(x), y).backward()
        found[layout] = difference(models.gradients(model), models.gradients(alone))
    return found


def masked_in_a_pipeline(method: str) -> tuple[str, float]:
    """Return how an odd length is refused, and how far the next step's gradients are off, in fp64.

    Tables of positions and a mask are made on every stage, and cut in its blocks.
    """
    torch.manual_seed(0)
    alone = Rotary().double()
    model = deepcopy(alone)
    layout = parallelize(model, "pp=2 cp=2", Pipeline(microbatches=2), ContextParallel(method))

    def batch(length: int) -> Tensor:
        return torch.arange(4 * length).view(4, length) % V

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), y.flatten())

    text = "accepted"
    try:
        layout.step(batch(7), batch(7), loss_of)
    except LayoutError as error:
        text = str(error)
    layout.step(batch(8), batch(8), loss_of)
    loss_of(alone(batch(8)), batch(8)).backward()
    mine, whole = models.gradients(model), models.gradients(alone)  # mine: of this stage
    return text, difference(mine, {name: whole[name] for name in mine})
