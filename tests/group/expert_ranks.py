"""What the ranks run in test_experts: mixtures that ep can share out, and some that it cannot."""

# B batch, S sequence, T tokens, K experts a token, E experts, D model width, F width in an expert

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from nbdist.engine.compat.torch_hooks import local_part
from nbdist.engine.data.batches import Shard
from nbdist.engine.data.order.shards import data_shard
from nbdist.engine.layout import publish as publishing
from nbdist.engine.layout.axes.ep import parameters
from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.policies.efficiency import (
    ActivationCheckpoint,
    Compress,
    Offload,
    Precision,
)
from nbdist.engine.layout.policies.policies import ExpertParallel, Pipeline, TensorParallel
from nbdist.engine.tap import tap
from nbdist.engine.training import expert_load
from nbdist.shared.errors import LayoutError
from tests.group import publish_ranks
from tests.group.layout_ranks import difference, state_of

STEPS, GLOBAL_BATCH = 3, 8
V, S, D, E, K, WIDE = 20, 6, 16, 4, 2, 12


class Mixture(nn.Module):
    """Experts with their weights in stacks; asks how many they are, and leaves out those unused."""

    def __init__(self, experts: int = E, width: int = D) -> None:
        super().__init__()
        self.experts, self.width = experts, width
        self.up = nn.Parameter(torch.randn(experts, WIDE, width) / 4)
        self.bias = nn.Parameter(torch.randn(experts, WIDE) / 4)
        self.down = nn.Parameter(torch.randn(experts, width, WIDE) / 4)

    def forward(self, x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        assert self.up.shape[0] == self.experts
        out_TD = torch.zeros_like(x_TD)
        for expert in index_TK.unique().tolist():
            token, place = torch.where(index_TK == expert)
            made = self.one(x_TD[token].view(-1, self.width), expert)
            weighed = made * weight_TK[token, place, None]
            out_TD.index_add_(0, token, weighed.to(out_TD.dtype))
        return out_TD

    def one(self, x: Tensor, expert: int) -> Tensor:
        inside = F.silu(F.linear(x, self.up[expert], self.bias[expert]))
        return F.linear(inside, self.down[expert])


class AtOnce(Mixture):
    """Each token takes the weights of its experts: the forward decides by no number, as tp asks."""

    def __init__(self) -> None:
        super().__init__()
        del self.bias

    def forward(self, x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        inside_TKF = torch.einsum("td,tkfd->tkf", x_TD, self.up[index_TK])
        made_TKD = torch.einsum("tkf,tkdf->tkd", F.silu(inside_TKF), self.down[index_TK])
        return (made_TKD * weight_TK[:, :, None]).sum(1)


class Dropping(Mixture):
    """With dropout in each expert."""

    def one(self, x: Tensor, expert: int) -> Tensor:
        return super().one(F.dropout(x, 0.3, self.training), expert)


class AcrossTokens(Mixture):
    """An expert's output follows from all tokens that there are."""

    def forward(self, x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        return super().forward(x_TD - x_TD.mean(0), index_TK, weight_TK)


class Block(nn.Module):
    """A router over all experts, and these."""

    def __init__(self, experts: nn.Module, count: int, width: int, *, keywords: bool) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, count)
        self.experts, self.keywords = experts, keywords

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = self.norm(x_BSD).flatten(0, 1)
        weight_TK, index_TK = self.router(x_TD).softmax(-1).topk(K)
        if self.keywords:
            made = self.experts(weight_TK=weight_TK, index_TK=index_TK, x_TD=x_TD)
        else:
            made = self.experts(x_TD, index_TK, weight_TK)
        return x_BSD + made.view_as(x_BSD)


class Net(nn.Module):
    """Two mixtures between an embedding and the head that is tied to it."""

    tp_plan = {  # noqa: RUF012  # as transformers' classes have it
        "blocks.*.experts": "moe_tp_experts",
        "blocks.*.experts.up": "colwise",
        "blocks.*.experts.down": "rowwise",
        "token": "embedding_rowwise",
        "head": "colwise_rep",
    }

    def __init__(
        self,
        experts: Callable[[], nn.Module] = Mixture,
        count: int = E,
        width: int = D,
        *,
        keywords: bool = False,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(V, width)
        self.blocks = nn.ModuleList(
            Block(experts(), count, width, keywords=keywords) for _ in range(2)
        )
        self.head = nn.Linear(width, V)
        self.head.weight = self.token.weight

    def forward(self, ids_BS: Tensor) -> Tensor:
        x = self.token(ids_BS)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _without_gradient(*endings: str, experts: Callable[[], nn.Module] = Mixture) -> Net:
    model = Net(experts)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.rpartition(".")[0].endswith(endings))
    return model


def _one_sided(experts: Callable[[], nn.Module] = Mixture) -> Net:
    """All tokens go to the first two experts, which are rank 0's."""
    model = Net(experts)
    for block in model.blocks:
        block.get_parameter("router.bias").data += torch.tensor([9.0, 8.0, 0.0, 0.0])
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "keywords": lambda: Net(keywords=True),
    "width of as many": lambda: Net(lambda: Mixture(width=E), width=E),
    "one-sided": _one_sided,
    "frozen experts": lambda: _without_gradient("experts"),
    "frozen router": lambda: _without_gradient("router"),
    "eight": lambda: Net(lambda: Mixture(8), 8),
    "at once": lambda: Net(AtOnce),
    "at once, one-sided": lambda: _one_sided(AtOnce),
    "at once, frozen experts": lambda: _without_gradient("experts", experts=AtOnce),
    "at once, frozen router": lambda: _without_gradient("router", experts=AtOnce),
}
POLICIES: dict[str, tuple[object, ...]] = {
    "": (),
    "checkpoint": (ActivationCheckpoint(),),
    "pipeline": (Pipeline(microbatches=2),),
    "bf16": (Precision("bf16"),),
    "experts whole": (TensorParallel(plan={"token": "vocab", "head": "gather"}),),
}


def make(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 + step)
    x_BS = torch.randint(V, (GLOBAL_BATCH, S), generator=random)
    return x_BS, (x_BS * 7 + 3) % V


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def _one_process(model: nn.Module, parts: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train as one process does on the same split: `parts` of a batch a step."""
    # Not Adam, which a gradient multiplied by any number leaves as it is.
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = loss_of(model(x_part), y_part)
            (loss / parts).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
    return losses, state_of(model)


def parity(cases: list[tuple[str, str, str]]) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Return, for each model, layout and policy, the differences of losses and final state."""
    return {case: beside_one_process(partial(make, case[0]), *case[1:]) for case in cases}


def beside_one_process(
    make: Callable[..., nn.Module], text: str, policy: str
) -> tuple[float, float]:
    """Return how far losses, and the final state, are from those of one process."""
    # Every rank begins with other weights, of which rank 0's count.
    layout = parallelize(make(seed=dist.get_rank()), text, *POLICIES[policy])
    opt = layout.optimizer(
        torch.optim.SGD,
        [p for p in layout.model.parameters() if p.requires_grad],
        lr=0.3,
        momentum=0.9,
        foreach=True,
    )
    shard = data_shard()
    losses = []
    for step in range(STEPS):
        x, y = (t.chunk(shard.count)[shard.index] for t in batch(step))
        if layout.pipeline is None:
            loss = loss_of(layout.model(x), y)
            loss.backward()
            losses.append(loss.item())
        else:
            layout.step(x, y, loss_of)
        layout.clip_grad_norm_(0.5)
        opt.step()
        opt.zero_grad()
    alone, state = _one_process(make(), shard.count)
    mine = alone[shard.index :: shard.count]
    in_losses = max((abs(a - b) for a, b in zip(losses, mine, strict=False)), default=0.0)
    given = {n: t for n, t in layout.state_dict().items() if not n.endswith("calls")}
    state = {n: t for n, t in state.items() if not n.endswith("calls")}
    return in_losses, difference(given, state) if given else 0.0


def looks_like_the_users_model() -> dict[str, Any]:
    model = make("net")
    names = [name for name, _ in model.named_parameters()]
    layout = parallelize(model, "ep=2")
    layout.step(*part_of(0), loss_of)
    return {
        "same names": [name for name, _ in model.named_parameters()] == names,
        "all DTensors": all(isinstance(p, DTensor) for p in model.parameters()),
        "tied": model.get_parameter("head.weight") is model.get_parameter("token.weight"),
        "again": parallelize(model, "ep=2") is layout,
        "held": [len(local_part(p)) for n, p in model.named_parameters() if ".experts." in n],
        "counted": [int(m.experts) for m in model.modules() if isinstance(m, Mixture)],
        "explained": repr(layout.explain()),
    }


def part_of(step: int) -> tuple[Tensor, Tensor]:
    shard = data_shard()
    x, y = (t.chunk(shard.count)[shard.index] for t in batch(step))
    return x, y


def whole_again(name: str, text: str) -> dict[str, bool]:
    """Return whether weights go out, into shards, and back bit for bit."""
    layout = parallelize(make(name), text)
    layout.step(*part_of(0), loss_of)
    torch.optim.SGD(layout.model.parameters(), lr=0.3).step()
    given = layout.state_dict()
    shards = parallelize(lambda: make(name, seed=7), "zero3")
    shards.load_from(layout)
    back = parallelize(lambda: make(name, seed=8), text)
    back.load_from(shards)
    plain = make(name, seed=9)
    if given:
        plain.load_state_dict(given)
        x, _ = batch(1)
    with torch.no_grad():
        x, _ = batch(1)
        theirs = layout.model(x[: 2 + data_shard().index])
        expected = plain(x[:2]) if given else theirs
    return {
        "trained": not given or difference(given, state_of(make(name))) > 1e-3,
        "shards": _same(shards.state_dict(), given),
        "back": _same(back.state_dict(), given),
        "outputs": not given or float((theirs - expected).abs().max()) < 1e-12,
    }


def published(text: str) -> dict[str, Any]:
    """Return whether a program that is published of trained experts has all of them, bit for bit.

    Rank 0 reads it as a server does: without the layout and without the model's class.
    """
    layout = parallelize(make("at once"), text)
    layout.step(*part_of(0), loss_of)
    torch.optim.SGD(layout.model.parameters(), lr=0.3).step()
    given = layout.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        told = publish_ranks.into(folder)
        publishing.publish(layout, "experts")
        publishing.here.place = None
        if not given:
            return {"told": told == []}
        program = torch.export.load(f"{told[0]['folder']}/data/model.pt2")
    plain = make("at once", seed=9).eval()
    plain.load_state_dict(given)
    x, _ = batch(1)
    with torch.no_grad():
        made = program.module()(x)
    return {
        "names": {"model." + name for name in given} - program.state_dict.keys(),
        "weights": all(torch.equal(given[n[6:]], t) for n, t in program.state_dict.items()),
        "outputs": torch.equal(made, plain(x)),
        "trained": difference(given, state_of(make("at once"))) > 1e-3,
    }


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def unequal_shares() -> float:
    """Return the difference of gradients to a batch in one piece, of which ranks had 5 and 3."""
    layout = parallelize(make("net"), "ep=2")
    x, y = batch(0)
    mine = slice(5) if dist.get_rank() == 0 else slice(5, 8)
    layout.step(x[mine], y[mine], loss_of)
    return _from_one_piece(layout, 1.0)


def in_two_backwards() -> float:
    """Return the same of a batch that each rank takes in two parts."""
    layout = parallelize(make("net"), "ep=2")
    x, y = part_of(0)
    for part in layout.accumulate(2):
        loss_of(layout.model(x.chunk(2)[part]), y.chunk(2)[part]).backward()
    return _from_one_piece(layout, 2.0)


def _from_one_piece(layout: Layout, scale: float) -> float:
    plain = make("net")
    x, y = batch(0)
    loss_of(plain(x), y).backward()
    held = dict(layout.model.named_parameters())
    worst = 0.0
    for name, p in plain.named_parameters():
        gradient: Any = held[name].grad
        worst = max(worst, float((gradient.full_tensor() / scale - p.grad).abs().max()))
    return worst


def bytes_sent() -> dict[str, float]:
    """Return the bytes that the tap counts in a forward and a backward, and those explained."""
    tap.install("full")
    layout = parallelize(make("net"), "ep=2")
    x, y = part_of(0)
    loss_of(layout.model(x), y).backward()
    tap.take()
    loss = loss_of(layout.model(x), y)
    forward = tap.take().bytes
    loss.backward()
    backward = tap.take().bytes
    return {
        "forward": forward,
        "backward": backward,
        "explained": layout.explain(batch=x).traffic["ep"],
        "whole": sum(
            p.numel()
            for p in layout.model.parameters()
            if isinstance(p, DTensor) and p.placements[0].is_replicate()
        ),
        "whole tensors": sum(
            isinstance(p, DTensor) and p.placements[0].is_replicate()
            for p in layout.model.parameters()
        ),
    }


def loads() -> dict[str, Any]:
    """Return what a step tells of experts, a second one of two parts, and one without training."""
    layout = parallelize(make("one-sided"), "ep=2", *POLICIES["checkpoint"])
    expert_load.here.begin_cell()
    x, y = part_of(0)
    loss_of(layout.model(x), y).backward()
    step, experts = expert_load.here.take(10**18)
    for part in layout.accumulate(2):
        loss_of(layout.model(part_of(part)[0]), y).backward()
    again = expert_load.here.take(10**18 + 1)
    layout.model.eval()
    loss_of(layout.model(x), y).backward()
    return {
        "step": step,
        "experts": experts,
        "again": again,
        "evaluated": expert_load.here.take(10**18 + 2),
    }


def proofs() -> dict[str, tuple[bool, str]]:
    """Return what `verify` says of what is right, and of gradients with a wrong divisor."""
    shard = Shard(dist.get_rank(), dist.get_world_size())
    x, y = (t.chunk(shard.count)[shard.index] for t in batch(0))
    found = {}
    for label, model, policy in (
        ("net", make("net"), ""),
        ("dropout", Net(Dropping).double(), ""),
        ("bf16", make("net").float(), "bf16"),
    ):
        proof = parallelize(model, "ep=2", *POLICIES[policy]).verify((x, y), loss_of)
        found[label] = (proof.ok, str(proof))
    layout = parallelize(make("net"), "ep=2")
    with sums_of_experts():
        proof = layout.verify((x, y), loss_of)
    found["sums"] = (proof.ok, str(proof))
    return found


@contextmanager
def sums_of_experts() -> Iterator[None]:
    """Have gradients of experts not divided by the ranks of ep."""
    native: Any = parameters._Average.backward

    def undivided(ctx: Any, *gradients: Any) -> Any:
        means = native(ctx, *gradients)
        return tuple(
            mean if mean is None or mean.placements[0].is_replicate() else mean * 2
            for mean in means
        )

    parameters._Average.backward = staticmethod(undivided)  # type: ignore[method-assign]
    try:
        yield
    finally:
        parameters._Average.backward = staticmethod(native)  # type: ignore[method-assign]


def compiled_afterwards() -> float:
    """Return the difference of gradients to those of blocks that are not compiled."""
    plain, model = (parallelize(make("net"), "ep=2").model for _ in range(2))
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager")
    for x, y in (part_of(0), part_of(1)):
        loss_of(plain(x), y).backward()
        loss_of(model(x), y).backward()
    one, other = (
        [local_part(p.grad) for p in each.parameters() if p.grad is not None]
        for each in (plain, model)
    )
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def refusals() -> dict[str, str]:
    """Return the text of each wrong use; the model must stay as it was."""
    texts = {}

    def refused(label: str, model: nn.Module, *policies: object, layout: str = "ep=2") -> None:
        try:
            parallelize(model, layout, *policies)
        except LayoutError as error:
            texts[label] = str(error)
            assert not any(isinstance(p, DTensor) for p in model.parameters())
            assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
            assert not any("forward" in vars(m) for m in model.modules())
        else:
            texts[label] = "accepted"

    whole, in_part = Net(), Net()
    whole.compile(backend="eager")
    in_part.blocks[1].compile(backend="eager")
    refused("none", nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)))
    refused("across tokens", Net(AcrossTokens))
    refused("three", Net(lambda: Mixture(3), 3))
    refused("no inputs", nn.ModuleList([Mixture()]))
    refused("example", Net(), ExpertParallel(example=torch.zeros(2, D)))
    refused("compiled part", in_part)
    adapted = Net()
    experts: Any = adapted.blocks[0].experts
    name = next(name for name, _ in experts.named_parameters())
    nn.utils.parametrize.register_parametrization(experts, name, nn.Identity())
    refused("made anew", adapted)
    refused("compiled", whole)
    refused("offload", Net(), Offload())
    refused("reduce", Net(), Precision("fp32", reduce="bf16"))
    refused("compress", Net(), Compress("bf16"))
    refused("zero1", Net(), layout="ep=2 zero1")
    refused("no axis", Net(), ExpertParallel(), layout="ddp")
    return texts


def refusals_of_four() -> dict[str, str]:
    texts = {}
    whole = TensorParallel(plan={"token": "vocab", "head": "gather"}, sequence=True)
    cases: dict[str, tuple[str, tuple[object, ...]]] = {
        "sequence": ("tp", (TensorParallel(sequence=True),)),
        "sequence, whole experts": ("tp", (whole,)),
        "cp": ("cp", ()),
        "pp": ("pp", (Pipeline("zero-bubble"),)),
    }
    for label, (axis, policies) in cases.items():
        model = Net(AtOnce)
        try:
            parallelize(model, f"{axis}=2 ep=2", *policies)
        except LayoutError as error:
            texts[label] = str(error)
            assert not any(isinstance(p, DTensor) for p in model.parameters())
    return texts


def called_in_another_way() -> tuple[str, str]:
    """Return the texts of a call without weights, and of an expert that there is not."""
    model = Net()
    parallelize(model, "ep=2")
    experts: Any = model.blocks[0].experts
    x, index, weight = torch.zeros(3, D), torch.zeros(3, K, dtype=torch.long), torch.ones(3, K)
    texts = []
    for index_TK, weight_TK in ((index, None), (index + E, weight)):
        try:
            experts(x, index_TK, weight_TK)
        except LayoutError as error:
            texts.append(str(error))
    first, second = texts
    return first, second


def several(calls: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    """Return what functions of this module give, one after the other on the same ranks."""
    found = []
    for name, arguments in calls:
        torch.manual_seed(0)
        found.append(globals()[name](*arguments))
        gc.collect()  # models that are gone have no say in the next
    return found
