"""What the ranks run in test_listed_experts: experts that are modules of a list."""

# B batch, S sequence, T tokens, K experts a token, E experts, D model width, F width in an expert

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from nbdist.engine.compat.torch_hooks import local_part
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.tap import tap
from nbdist.shared.errors import LayoutError
from tests.group.expert_ranks import (
    POLICIES,
    batch,
    beside_one_process,
    loss_of,
    part_of,
    sums_of_experts,
)
from tests.group.expert_ranks import Mixture as Stacked
from tests.group.expert_ranks import Net as StackedNet

STEPS = 3
V, S, D, E, K, WIDE = 20, 6, 16, 4, 2, 12


class Expert(nn.Module):
    """A feed-forward network, of which one parameter has no equal parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, WIDE), nn.Linear(WIDE, D, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x))) * self.scale


class Router(nn.Module):
    """Adds, as a side effect, to a list of losses that is nobody's: it must run once."""

    def __init__(self, count: int = E) -> None:
        super().__init__()
        self.gate = nn.Linear(D, count)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return self.gate(x_TD).softmax(-1).topk(K)


class Mixture(nn.Module):
    """As most write it: a loop over experts, without those that no token has chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(Expert() for _ in range(E))
        self.drop = nn.Dropout(0.0)

    def forward(self, x_TD: Tensor) -> Tensor:
        assert isinstance(self.router, Router)
        weight_TK, index_TK = self.router(x_TD)
        out_TD = torch.zeros_like(x_TD)
        for e in self.order():
            token, place = torch.where(index_TK == e)
            if token.numel():
                made = self.drop(self.experts[e](x_TD[token]))
                out_TD[token] += weight_TK[token, place, None] * made
        return out_TD

    def order(self) -> list[int]:
        return list(range(E))


class Dense(Mixture):
    """All experts over all tokens, called by a name, and a shared one after them."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Expert()

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_TK, index_TK = self.router(x_TD)
        share_TE = torch.zeros(len(x_TD), E, dtype=x_TD.dtype).scatter(1, index_TK, weight_TK)
        made = sum(share_TE[:, i, None] * one(x=x_TD) for i, one in enumerate(self.experts))
        return made + self.shared(x_TD)


class Again(Mixture):
    """Each expert is called twice, first from the last one on."""

    def order(self) -> list[int]:
        return [*reversed(range(E)), *range(E)]


class Unguarded(Mixture):
    """Calls experts that no token has chosen, too."""

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_TK, index_TK = self.router(x_TD)
        out_TD = torch.zeros_like(x_TD)
        for e in self.order():
            token, place = torch.where(index_TK == e)
            made = self.experts[e](x_TD[token])
            out_TD.index_add_(0, token, made * weight_TK[token, place, None])
        return out_TD


class Traced(Stacked):
    """Stacks, computed densely: no number decides what runs, so that pp can plan with it."""

    def forward(self, x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        share_TE = weight_TK.new_zeros(len(x_TD), self.experts).scatter(1, index_TK, weight_TK)
        inside = F.silu(torch.einsum("td,efd->tef", x_TD, self.up) + self.bias)
        return torch.einsum("tef,edf,te->td", inside, self.down, share_TE)


class Block(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(D), mixture

    def forward(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + self.moe(self.norm(x_BSD).flatten(0, 1)).view_as(x_BSD)


class Net(nn.Module):
    """Two mixtures between an embedding and the head that is tied to it."""

    def __init__(self, mixture: Callable[[], nn.Module] = Mixture) -> None:
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block(mixture()) for _ in range(2))
        self.head = nn.Linear(D, V)
        self.head.weight = self.token.weight

    def forward(self, ids_BS: Tensor) -> Tensor:
        x = self.token(ids_BS)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _frozen(*endings: str) -> Net:
    model = Net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in endings))
    return model


def _biased(*bias: float, mixture: Callable[[], nn.Module] = Mixture) -> Net:
    model = Net(mixture)
    for block in model.blocks:
        block.get_parameter("moe.router.gate.bias").data += torch.tensor(bias)
    return model


class Alone(nn.Module):
    """A mixture that is the model: its experts are all the blocks that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.token = Router(), nn.Embedding(V, D)
        self.experts = nn.ModuleList(Expert() for _ in range(E))
        self.head = nn.Linear(D, V)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSD = self.token(ids_BS)
        weight_BSK, index_BSK = self.router(x_BSD)
        out_BSD = torch.zeros_like(x_BSD)
        for e, expert in enumerate(self.experts):
            share_BS = (weight_BSK * (index_BSK == e)).sum(-1)
            if share_BS.any():
                made = expert(x_BSD)
                made *= share_BS[..., None]
                out_BSD += made
        out_BSD += x_BSD
        return self.head(out_BSD)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "loop": Net,
    "stacked": lambda: StackedNet(Traced),
    "dense": lambda: Net(Dense),
    "alone": Alone,
    "again": lambda: Net(Again),
    "one-sided": lambda: _biased(99.0, 98.0, 0.0, 0.0),  # none for those of rank 1
    "empty calls": lambda: _biased(99.0, 98.0, 0.0, 0.0, mixture=Unguarded),
    "frozen experts": lambda: _frozen("experts"),
    "frozen parts": lambda: _frozen("up", "token"),
    "frozen router": lambda: _frozen("router", "token", "norm"),
}


def make(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().double()


def parity(cases: list[tuple[str, str, str]]) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Return, for each model, layout and policy, the differences of losses and final state."""
    return {case: beside_one_process(partial(make, case[0]), *case[1:]) for case in cases}


def looks_like_the_users_model() -> dict[str, Any]:
    model = make("loop")
    names = list(model.state_dict())
    layout = parallelize(model, "ep=2")
    x, y = part_of(0)
    layout.step(x, y, loss_of)
    torch.optim.SGD(layout.model.parameters(), lr=0.3).step()
    given = layout.state_dict()
    shards = parallelize(lambda: make("loop", seed=7), "zero3")
    shards.load_from(layout)
    back = parallelize(lambda: make("loop", seed=8), "ep=2")
    back.load_from(shards)
    returned = back.state_dict()
    back.model.requires_grad_(False)
    plain = make("loop", seed=9)
    plain.load_state_dict(given or plain.state_dict())
    with torch.inference_mode():
        theirs, expected, frozen = layout.model(x), plain(x), back.model(x)
    return {
        "names": list(model.state_dict()) == names,
        "calls of a router": int(model.get_buffer("blocks.0.moe.router.calls")),
        "again": parallelize(model, "ep=2") is layout,
        "outputs": not given or float((theirs - expected).abs().max()) < 1e-12,
        "frozen": not given or float((frozen - expected).abs().max()) < 1e-12,
        "back": all(torch.equal(returned[name], given[name]) for name in given),
        "held": sum(local_part(p).numel() for n, p in model.named_parameters() if ".experts." in n),
        "whole": sum(p.numel() for n, p in plain.named_parameters() if ".experts." in n),
        "explained": repr(layout.explain(batch=x)),
    }


def unequal_shares(of_first: int) -> float:
    """Return the difference of gradients to a batch of which rank 0 had so many samples, or all."""
    layout, plain = parallelize(make("loop"), "ep=2"), make("loop")
    x, y = batch(0)
    mine = slice(of_first) if dist.get_rank() == 0 else slice(of_first, None)

    def summed(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum")

    summed(layout.model(x[mine]), y[mine]).backward()
    summed(plain(x), y).backward()
    held = dict(layout.model.named_parameters())
    gradients: list[tuple[Any, Any]] = [(held[n].grad, p.grad) for n, p in plain.named_parameters()]
    return max(float((2 * a.full_tensor() - b).abs().max()) for a, b in gradients)


def bytes_sent() -> dict[str, float]:
    """Return the bytes that the tap counts in a forward and a backward, and those explained."""
    tap.install("full")
    layout = parallelize(make("dense"), "ep=2")
    x, y = part_of(0)
    loss_of(layout.model(x), y).backward()
    tap.take()
    loss = loss_of(layout.model(x), y)
    forward = tap.take().bytes
    loss.backward()
    held = [p for p in layout.model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in held if p.placements[0].is_replicate()]
    parts = [p for p in held if not p.placements[0].is_replicate()]
    return {
        "forward": forward,
        "backward": tap.take().bytes,
        "explained": layout.explain(batch=x).traffic["ep"],
        "whole": sum(p.numel() + 1 for p in whole),
        "parts": sum(local_part(p).numel() for p in parts),
        "part tensors": len(parts),
    }


class Dropping(Expert):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.3, self.training))


class Noisy(Mixture):
    """With noise of its own on the tokens, and a list of what its router has given."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Dropping() for _ in range(E))
        self.kept: list[Tensor] = []

    def forward(self, x_TD: Tensor) -> Tensor:
        made = super().forward(x_TD * (1 + torch.rand_like(x_TD) / 100 * self.training))
        self.kept.append(made)
        return made


class Drawing(Mixture):
    """Has noise on its tokens, in evaluation, too."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return super().forward(x_TD + torch.randn_like(x_TD))


def proofs() -> dict[str, tuple[bool, str]]:
    """Return what `verify` says of what is right, and of gradients with a wrong divisor."""
    x, y = part_of(0)
    found = {}
    for label, model, policy in (
        ("loop", make("loop"), ""),
        ("noise", Net(Noisy).double(), ""),
        ("bf16", make("loop").float(), "bf16"),
    ):
        proof = parallelize(model, "ep=2", *POLICIES[policy]).verify((x, y), loss_of, steps=1)
        found[label] = (proof.ok, str(proof))
    with sums_of_experts():
        proof = parallelize(make("loop"), "ep=2").verify((x, y), loss_of, steps=1)
    found["sums"] = (proof.ok, str(proof))
    before_it = torch.get_rng_state()
    drawing = parallelize(Net(Drawing), "ep=2")
    found["draws"] = (bool(torch.isfinite(drawing.model(x)).all()), repr(drawing.explain()))
    torch.set_rng_state(before_it)
    layout = parallelize(Net(Noisy), "ep=2")
    mixtures: list[Any] = [m for m in layout.model.modules() if isinstance(m, Noisy)]
    before = [len(mixture.kept) for mixture in mixtures]
    layout.model(x)
    kept = [len(mixture.kept) - n for mixture, n in zip(mixtures, before, strict=True)]
    found["kept"] = (kept == [1, 1], str(kept))
    return found


class Normed(Expert):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)


class Chained(Mixture):
    """Layers, not experts."""

    def forward(self, x_TD: Tensor) -> Tensor:
        for one in self.experts:
            x_TD = one(x_TD)
        return x_TD


class AcrossRows(Expert):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Reading(Mixture):
    """Reads the weights of its experts beside calling them."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return super().forward(x_TD) + self.experts[0].get_parameter("scale")


class Penal(Mixture):
    """Makes a penalty of the weights of its experts."""

    def forward(self, x_TD: Tensor) -> Tensor:
        self.penalty = sum(p.pow(2).sum() for p in self.experts.parameters())
        return super().forward(x_TD)


class Jittering(Mixture):
    """Changes its input in place while it trains."""

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.training:
            x_TD *= 1.5
        return super().forward(x_TD)


class Turning(Unguarded):
    """Has its experts in another order each time."""

    turns = iter(range(1000))

    def order(self) -> list[int]:
        turn = next(self.turns) if self.training else 0
        return [(turn + e) % E for e in range(E)]


def of(kind: Callable[[], nn.Module], count: int = E) -> Callable[[], nn.Module]:
    def mixture() -> nn.Module:
        made = Dense()
        made.experts = nn.ModuleList(kind() for _ in range(count))
        return made

    return mixture


def shared() -> nn.Module:
    made = Mixture()
    for one in made.experts:
        one.up = made.experts[0].up
    return made


class OneBias(Stacked):
    """Stacks, and a bias that all of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.zeros(D))


def refusals() -> dict[str, str]:
    """Return the text of each wrong use; the model must stay as it was."""
    texts = {}
    for label, model in (
        ("chained", Net(Chained)),
        ("buffers", Net(of(Normed))),
        ("shared", Net(shared)),
        ("across rows", Net(of(AcrossRows))),
        ("reading", Net(Reading)),
        ("penalty", Net(Penal)),
        ("three", Net(of(Expert, 3))),
        ("one bias", StackedNet(OneBias)),
    ):
        try:
            parallelize(model, "ep=2")
        except LayoutError as error:
            texts[label] = str(error)
            assert not any(isinstance(p, DTensor) for p in model.parameters())
            assert not any("forward" in vars(m) for m in model.modules())
        else:
            texts[label] = "accepted"
    for label, mixture in (("jittering", Jittering), ("turning", Turning)):
        layout = parallelize(Net(mixture), "ep=2")
        try:
            layout.model(part_of(0)[0])
        except LayoutError as error:
            texts[label] = str(error)
    return texts


def compiled_afterwards() -> float:
    """Return the difference of gradients to those of blocks that are not compiled."""
    plain, model = (parallelize(make("loop"), "ep=2").model for _ in range(2))
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


def several(calls: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    """Return what functions of this module give, one after the other on the same ranks."""
    found = []
    for name, arguments in calls:
        torch.manual_seed(0)
        found.append(globals()[name](*arguments))
        gc.collect()  # models that are gone have no say in the next
    return found
