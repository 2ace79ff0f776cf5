"""What the ranks run in test_tensor_parallel: models that tp can cut, and some that it cannot."""

# B batch, T sequence, H heads, D model width, V vocabulary

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel
from torch.nn import functional as F

from nbdist.engine.data import batches
from nbdist.engine.data.make import loader
from nbdist.engine.data.order.shards import data_shard
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.policies.policies import Pipeline, TensorParallel
from nbdist.shared.errors import LayoutError
from tests.group import tensor_kinds as kinds
from tests.group.layout_ranks import difference, state_of

STEPS, GLOBAL_BATCH = 3, 8
V, T, D, H = kinds.V, kinds.T, kinds.D, kinds.H
PLAN = {
    "blocks.*.attn.q": "column",
    "blocks.*.attn.k": "column",
    "blocks.*.attn.v": "column",
    "blocks.*.attn.out": "row",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
}


Part = Callable[[], nn.Module]


class Attention(nn.Module):
    def __init__(self, heads: int = H) -> None:
        super().__init__()
        self.head_dim = D // heads
        # No bias for keys: it has no effect, and AdamW blows its rounding up to a full step.
        self.q, self.k = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.v, self.out = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, _ = x_BTD.shape
        q, k, v = (
            p(x_BTD).view(b, t, -1, self.head_dim).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, attention: Part = Attention, mlp: Part = MLP) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn, self.mlp = attention(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Tied embeddings, and a table of positions that is read without calling it."""

    def __init__(self, block: Any = Block, vocabulary: int = V) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x_BT: Tensor) -> Tensor:
        x = self.token(x_BT) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class InPlaceBlock(Block):
    """As Falcon's: what a layer returns is changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        made: Tensor = self.mlp(self.norm_2(x))
        made += x
        return made


class AddedParameters(GPT):
    """As a vision transformer's: two parameters that one sum adds, and one gradient is for both."""

    def __init__(self) -> None:
        super().__init__(InPlaceBlock)
        self.first, self.places = (
            nn.Parameter(torch.randn(1, 1, D)),
            nn.Parameter(torch.randn(T, D)),
        )

    def forward(self, x_BT: Tensor) -> Tensor:
        given = self.token(x_BT)[:, 1:]
        x = torch.cat([self.first.expand(len(given), -1, -1), given], 1) + self.places[None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class NormedHeads(Attention):
    """Norms of queries and keys inside of a head: right to cut, with summed gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.LayerNorm(self.head_dim)
        self.k_norm = nn.LayerNorm(self.head_dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, _ = x_BTD.shape
        q, k, v = (p(x_BTD).view(b, t, -1, self.head_dim) for p in (self.q, self.k, self.v))
        q, k, v = (x.transpose(1, 2) for x in (self.q_norm(q), self.k_norm(k), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, t, -1))


class NormedFeatures(MLP):
    """A norm without weights over all features: shapes fit a part of them, numbers do not."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.down(x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt())


class FixedHeads(Attention):
    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, d = x_BTD.shape
        q, k, v = (p(x_BTD).view(b, t, H, d // H).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, t, d))


class ThreeHeads(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads = 3


class ScaledInput(Attention):
    """Works on what the columns take."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, D))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class ScaledOutput(MLP):
    """Works on what the row makes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, D))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class ScaledInBlock(Block):
    """As the two, where sequence=True knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.of_input = nn.Parameter(torch.linspace(0.5, 1.5, D))
        self.of_output = nn.Parameter(torch.linspace(0.5, 1.5, D))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x) * self.of_input)
        return x + self.mlp(self.norm_2(x)) * self.of_output


class Noisy(MLP):
    """Draws for features of which a rank has a part."""

    def forward(self, x: Tensor) -> Tensor:
        made = self.up(x)
        return self.down(F.gelu(made + torch.randn_like(made)))


class NoisyInput(MLP):
    """Draws for what all ranks have whole."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


class ThreeKeys(Attention):
    n_heads, n_kv_heads = 6, 3


class PackedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, d = x_BTD.shape
        q, k, v = (x.view(b, t, H, -1).transpose(1, 2) for x in self.qkv(x_BTD).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, t, d))


class Dropping(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class FlatBlock(nn.Module):
    """Linears lie in the block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def block_of(attention: Part = Attention, mlp: Part = MLP) -> Any:
    return lambda: Block(attention, mlp)


def llama(heads: int = 4, key_heads: int = 2, layers: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=2 * D,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=8,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(sizes)


MODELS: dict[str, Any] = {
    "gpt": GPT,
    "normed heads": lambda: GPT(block_of(NormedHeads)),
    "odd vocabulary": lambda: GPT(vocabulary=37),
    "packed": lambda: GPT(block_of(PackedAttention)),
    "llama": llama,
    "added parameters": AddedParameters,
    "scaled in block": lambda: GPT(ScaledInBlock),
}
KINDS: dict[str, Any] = {
    "packed heads": lambda: GPT(block_of(kinds.Packed, kinds.Gated)),
    "packed, few keys": lambda: GPT(block_of(kinds.FewKeys)),
    "interleaved": lambda: GPT(block_of(kinds.Interleaved)),
    "related": lambda: GPT(block_of(kinds.Related)),
    "scaled": lambda: GPT(block_of(kinds.Scaled)),
    "crossed": lambda: GPT(block_of(kinds.Crossed)),
    "one key": lambda: GPT(block_of(kinds.OneKey)),
    "llama, one key": lambda: llama(key_heads=1),
    "chain": kinds.Chain,
    "gpt2": kinds.gpt2,
    "mixtral": kinds.mixtral,
    "phi3": kinds.phi3,
}


def make(name: str, dtype: torch.dtype, seed: int = 0, made: Any = MODELS | KINDS) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = made[name]().to(dtype)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 + step)
    x_BT = torch.randint(V, (GLOBAL_BATCH, T), generator=random)
    return x_BT, (x_BT * 7 + 3) % V


def loss_of(out: Any, y: Tensor) -> Tensor:
    logits = out.logits if hasattr(out, "logits") else out
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def one_process(
    name: str, dtype: torch.dtype, parts: int, max_norm: float, made: Any = MODELS | KINDS
) -> tuple[list[float], dict[str, Tensor]]:
    """Train as one process does on the same split: `parts` micro-batches a step."""
    model = make(name, dtype, made=made)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = loss_of(model(x_part), y_part)
            (loss / parts).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        opt.step()
        opt.zero_grad()
    return losses, state_of(model)


def train(
    name: str, dtype: torch.dtype, layout: str, policy: TensorParallel, max_norm: float
) -> tuple[list[float], dict[str, Tensor]]:
    """Train this rank's part; every rank begins with other weights, of which rank 0's count."""
    model = make(name, dtype, seed=dist.get_rank())
    spread = parallelize(model, layout, policy)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    shard = data_shard()
    losses = []
    for step in range(STEPS):
        x, y = (t.chunk(shard.count)[shard.index] for t in batch(step))
        with loss_parallel() if policy.loss else nullcontext():
            loss = loss_of(model(x), y)
            loss.backward()
        spread.clip_grad_norm_(max_norm)
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    return losses, state_of(model)


def parity(
    name: str, cases: list[tuple[str, TensorParallel]], dtypes: list[str]
) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Return, for each layout, policy and dtype, the differences of losses and final state."""
    found = {}
    alone = cache(one_process)
    for dtype in dtypes:
        for layout, policy in cases:
            mine, final = train(name, getattr(torch, dtype), layout, policy, 0.5)
            shard = data_shard()
            losses, state = alone(name, getattr(torch, dtype), shard.count, 0.5)
            theirs = losses[shard.index :: shard.count]
            in_losses = max(abs(a - b) for a, b in zip(mine, theirs, strict=True))
            found[layout, str(policy), dtype] = (in_losses, difference(final, state))
    return found


def looks_like_the_users_model() -> dict[str, Any]:
    model = make("gpt", torch.float32)
    names = [name for name, _ in model.named_parameters()]
    spread = parallelize(model, "tp=2")
    return {
        "same names": [name for name, _ in model.named_parameters()] == names,
        "all DTensors": all(isinstance(p, DTensor) for p in model.parameters()),
        "tied": model.get_parameter("head.weight") is model.get_parameter("token.weight"),
        "again": parallelize(model, "tp=2") is spread,
        "held": sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor)),
        "count": spread.size.parameters,
        "repr": repr(spread),
        "explained": repr(spread.explain()),
    }


def explained_of(names: list[str]) -> dict[str, str]:
    """Return how each model's plan is explained."""
    made = {name: make(name, torch.float32) for name in names}
    return {name: repr(parallelize(m, "tp=2").explain()) for name, m in made.items()}


def plans() -> dict[str, str]:
    """Return how each plan is explained: of models, of words and of torch's styles."""
    explained = explained_of(list(MODELS))
    mine = parallelize(GPT(), "tp=2", TensorParallel(PLAN))
    styles = TensorParallel(
        {"blocks.*.mlp.up": ColwiseParallel(), "blocks.*.mlp.down": RowwiseParallel()}
    )
    explained |= {"words": repr(mine.explain())}
    explained |= {"styles": repr(parallelize(GPT(), "tp=2", styles).explain())}
    return explained


class OnlyPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.attention = nn.MultiheadAttention(D, 1, batch_first=True)

    def forward(self, x_BT: Tensor) -> Tensor:
        x = self.token(x_BT)
        return self.attention(x, x, x, need_weights=False)[0]


def refusals() -> dict[str, str]:
    """Return the text of each wrong use; the model must stay as it was, so that ddp still works."""
    texts = {}

    def refused(
        label: str, model: nn.Module, *policies: TensorParallel, layout: str = "tp=2"
    ) -> None:
        forwards = [dict(module.__dict__).get("forward") for module in model.modules()]
        try:
            parallelize(model, layout, *policies)
        except LayoutError as error:
            texts[label] = str(error)
            assert not any(isinstance(p, DTensor) for p in model.parameters())
            assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
            assert forwards == [dict(m.__dict__).get("forward") for m in model.modules()]
        else:
            texts[label] = "accepted"

    def plan(**words: Any) -> TensorParallel:
        return TensorParallel({key.replace("__", "."): word for key, word in words.items()})

    refused("heads", GPT(block_of(ThreeHeads)))
    refused("key heads", GPT(block_of(ThreeKeys)))
    refused("fixed heads", GPT(block_of(FixedHeads)))
    refused("norm over features", GPT(block_of(mlp=NormedFeatures)))
    refused("multihead", OnlyPacked())
    refused("no such module", GPT(), plan(blocks__0__mlp__upp="column"))
    refused("no such word", GPT(), plan(head="diagonal"))
    refused("no linear", GPT(), plan(norm="column"))
    refused("tied", GPT(), plan(token="vocab"))
    refused("odd", GPT(vocabulary=37), plan(token="vocab", head="head"))
    refused("loss without a head", GPT(vocabulary=37), TensorParallel(loss=True))
    both = TensorParallel(sequence=True)
    refused("scaled input", GPT(block_of(ScaledInput)), both)
    refused("scaled output", GPT(block_of(mlp=ScaledOutput)), both)
    refused("noisy", GPT(block_of(mlp=Noisy)))
    parallelize(GPT(block_of(mlp=NoisyInput)), "tp=2")
    refused("sequence in flat blocks", GPT(FlatBlock), TensorParallel(sequence=True))
    refused("no axis", GPT(), TensorParallel(), layout="ddp")
    refused("twice", GPT(), TensorParallel(), TensorParallel())
    refused("example", GPT(), TensorParallel(example=torch.zeros(1, T + 1, dtype=torch.int64)))
    refused("ranks differ", GPT(), TensorParallel(sequence=dist.get_rank() == 0))
    kept = GPT()
    opt = torch.optim.SGD(kept.parameters(), lr=0.1)
    refused("old optimizer", kept)
    del opt
    refused("nothing", nn.Sequential(nn.Linear(4, 6)))
    refused("mixed", nn.Sequential(nn.Linear(4, 6), nn.Softmax(-1), nn.Linear(6, 2)))
    fixed = GPT(block_of(FixedHeads))
    refused("fixed heads, then ddp", fixed)
    assert parallelize(fixed, "ddp").name == "ddp"
    spread = GPT()
    parallelize(spread, "tp=2")
    try:
        parallelize(spread, "tp=2", TensorParallel(sequence=True))
    except LayoutError as error:
        texts["other policies"] = str(error)
    long = llama()
    parallelize(long, "tp=2", TensorParallel(sequence=True))
    try:
        long(torch.zeros(1, 13, dtype=torch.int64))
    except LayoutError as error:
        texts["length"] = str(error)
    return texts


def refusals_of_kinds() -> dict[str, str]:
    """Return the text of each use of the kinds that is wrong."""
    texts = {}

    def refused(label: str, model: nn.Module, *policies: TensorParallel) -> None:
        try:
            parallelize(model, "tp=2", *policies)
        except LayoutError as error:
            texts[label] = str(error)
            assert not any(isinstance(p, DTensor) for p in model.parameters())

    refused("mixing", GPT(block_of(kinds.Mixing)))
    refused("adapted experts", kinds.adapted_experts())
    refused("conv1d", kinds.gpt2(), TensorParallel({"transformer.h.0.mlp.c_fc": "head"}))
    refused(
        "experts", kinds.mixtral(), TensorParallel({"model.layers.*.mlp.experts.down_proj": "row"})
    )
    refused(
        "experts alone",
        kinds.mixtral(),
        TensorParallel({"model.layers.0.mlp.experts": "moe_tp_experts"}),
    )
    refused("experts, sequence", kinds.mixtral(), TensorParallel(sequence=True))
    refused("packed without a row", GPT(), TensorParallel({"head": "packed"}))
    refused("theirs", kinds.phi3(), TensorParallel({"model.norm": "mla_kv_a_proj"}))
    return texts


def too_many_parts() -> str:
    class FewKeys(Attention):
        n_heads, n_kv_heads = 4, 2

    try:
        parallelize(GPT(block_of(FewKeys)), "tp=4")
    except LayoutError as error:
        return str(error)
    return "accepted"


def chain_over_stages() -> list[str]:
    """Return what pp says of pairs that lie on one stage each, and on two."""
    width = 8
    texts = []
    for split in (["0", "4"], ["0", "2"]):
        torch.manual_seed(0)
        layers = [nn.Linear(width, width) if n % 2 == 0 else nn.Tanh() for n in range(7)]
        model = nn.Sequential(*layers).double()
        try:
            spread = parallelize(model, "pp=2 tp=2", Pipeline(split=split))
        except LayoutError as error:
            texts.append(str(error))
            continue
        x = torch.randn(8, width, dtype=torch.float64)
        proof = spread.verify((x, None), lambda out, _y: out.square().mean(), steps=1)
        texts.append("right" if proof.ok else proof.verdict)
    return texts


def makes_a_table_once() -> bool:
    class Remembers(MLP):
        table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.zeros(x.shape[-1])
            return super().forward(x + self.table)

    model = GPT(block_of(mlp=Remembers))
    parallelize(model, "tp=2")
    x, y = batch(0)
    loss_of(model(x), y).backward()
    return type(model.get_submodule("blocks.0.mlp").table) is Tensor


def samples_of_ranks(layout: str) -> tuple[list[int], list[int], list[int]]:
    """Return what a loader gives under a layout, again, and when its model is gone."""
    model = GPT()
    spread = parallelize(model, layout)

    def first_batch() -> list[int]:
        return next(iter(loader(range(64), global_batch=16))).tolist()

    here, again = first_batch(), first_batch()
    del model, spread  # cycles keep them alive until somebody collects
    return here, again, first_batch()


def outputs_with_dropout() -> tuple[list[float], list[float]]:
    """Return two outputs in training, of ranks that were seeded in ways of their own."""
    torch.manual_seed(100 + dist.get_rank())
    model = GPT(block_of(mlp=Dropping))
    parallelize(model, "dp=2 tp=2")
    x, _ = batch(0)
    return model(x).flatten().tolist(), model(x).flatten().tolist()


def gradients_of_parts(layouts: list[str]) -> list[tuple[float, bool, float]]:
    return [gradient_of_parts(layout) for layout in layouts]


def gradient_of_parts(layout: str) -> tuple[float, bool, float]:
    """Accumulate two parts; compare with one process on the whole batch, in fp64."""
    model, alone = make("gpt", torch.float64), make("gpt", torch.float64)
    spread = parallelize(model, layout)
    shard = data_shard()
    x, y = (t.chunk(shard.count)[shard.index] for t in batch(0))
    differ = True
    for part in spread.accumulate(2):
        (loss_of(model(x.chunk(2)[part]), y.chunk(2)[part]) / 2).backward()
        if part == 0 and layout == "ddp":
            mine = next(model.parameters()).grad
            assert mine is not None
            others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(others, mine)
            differ = not torch.equal(others[0], others[-1])
    whole_x, whole_y = batch(0)
    loss_of(alone(whole_x), whole_y).backward()
    norm = spread.clip_grad_norm_(1e-3)
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 1e-3)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    theirs = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
    return difference(whole, theirs), differ, float(norm - expected)


def gradients_sample_by_sample() -> float:
    """Accumulate a batch, each sample alone; compare with one process on all of it, in fp64."""
    model, alone = (make("added parameters", torch.float64) for _ in range(2))
    parallelize(model, "tp=2")
    x, y = batch(0)
    for i in range(len(x)):
        (loss_of(model(x[i : i + 1]), y[i : i + 1]) / len(x)).backward()
    loss_of(alone(x), y).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if isinstance(p.grad, DTensor)}
    theirs = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    return difference({n: g.full_tensor() for n, g in grads.items()}, theirs)


def gradients_of_scales_in_a_block() -> float:
    """Return how far gradients with sequence=True are from one process's, in fp64."""
    model, alone = (make("scaled in block", torch.float64) for _ in range(2))
    parallelize(model, "tp=2", TensorParallel(sequence=True))
    x, y = batch(0)
    loss_of(model(x), y).backward()
    loss_of(alone(x), y).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if isinstance(p.grad, DTensor)}
    theirs = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    return difference({n: g.full_tensor() for n, g in grads.items()}, theirs)


def unknown_words() -> str:
    """Return what a model says of a word that its table does not have, and a tokenizer may."""
    model = make("gpt", torch.float32)
    parallelize(model, "tp=2")
    try:
        model(torch.full((1, T), V + 3))
    except IndexError as error:
        return str(error)
    return "nothing"


def steps_on_uneven_shares(cases: list[tuple[str, TensorParallel]]) -> list[tuple[float, float]]:
    """Share seven samples; compare gradients and losses with one process on all, in fp64."""
    x, y = (t[:7] for t in batch(0))
    alone = make("gpt", torch.float64)
    loss_of(alone(x), y).backward()
    theirs = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    found = []
    for layout, policy in cases:
        model = make("gpt", torch.float64)
        spread = parallelize(model, layout, *([policy] if "tp" in layout else []))
        shard = data_shard()
        mine = batches.part(0, 7, shard)
        loss = spread.step(x[mine], y[mine], loss_of)
        assert loss is not None
        expected = loss_of(alone(x[mine]), y[mine])
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
        found.append((difference(whole, theirs), float(loss - expected.detach())))
    return found


def survives_an_interrupt() -> dict[str, Any]:
    """A forward that ends in an interrupt leaves the model as it was."""
    model = GPT()
    parallelize(model, "tp=2")
    before = [id(p) for p in model.parameters()]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.get_submodule("blocks.1.norm_2").register_forward_pre_hook(interrupt)
    x, y = batch(0)
    try:
        model(x)
    except KeyboardInterrupt:
        hook.remove()
    same = before == [id(p) for p in model.parameters()]
    loss_of(model(x), y).backward()
    return {"same": same, "gradients": all(p.grad is not None for p in model.parameters())}


def several(calls: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    """Return what functions of this module give, one after the other on the same ranks."""
    found = []
    for name, arguments in calls:
        torch.manual_seed(0)
        found.append(globals()[name](*arguments))
        gc.collect()  # models that are gone have no say in the next
    return found
