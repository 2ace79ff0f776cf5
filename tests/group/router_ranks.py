"""What the ranks run in test_router_mistakes: mistakes in routers of experts, under ep=2."""

# T tokens, D width, E experts, K chosen

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbdist.engine.layout.parallelize import parallelize
from tests.group import expert_ranks
from tests.group.adapter_ranks import attempt
from tests.group.expert_ranks import Block, E, K, Net, batch

CAPACITY = 8  # tokens of a forward that an expert takes


def route(block: Any, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    return block.router(x_TD).softmax(-1).topk(K)


def without_weights(block: Any, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Take the choice of the router, and forget how sure it was."""
    weight_TK, index_TK = route(block, x_TD)
    return torch.full_like(weight_TK, 1 / K), index_TK


def without_gradients(block: Any, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return route(block, x_TD)


def with_noise(block: Any, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from a generator that nobody seeds."""
    logits_TE = block.router(x_TD)
    noise = torch.rand(logits_TE.shape, generator=_OWN, dtype=logits_TE.dtype)
    return (logits_TE + noise).softmax(-1).topk(K)


_OWN = torch.Generator()


def with_capacity(block: Any, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Give an expert no more tokens of a rank than it has room for."""
    weight_TK, index_TK = route(block, x_TD)
    chosen_TKE = torch.nn.functional.one_hot(index_TK, E)
    place_TK = (chosen_TKE.flatten(0, 1).cumsum(0).view_as(chosen_TKE) * chosen_TKE).sum(-1)
    return weight_TK * (place_TK <= CAPACITY), index_TK


class Routed(Block):
    """A block whose router is one of these."""

    way: Any = staticmethod(route)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = self.norm(x_BSD).flatten(0, 1)
        weight_TK, index_TK = type(self).way(self, x_TD)
        return x_BSD + self.experts(x_TD, index_TK, weight_TK).view_as(x_BSD)


class Balanced(Net):
    """Also returns what balances the router: each expert's part of tokens times its certainty."""

    def forward(self, ids_BS: Tensor) -> Any:
        logits = super().forward(ids_BS)
        block: Any = self.blocks[0]
        share_TE = block.router(self.token(ids_BS).flatten(0, 1)).softmax(-1)
        part_E = torch.nn.functional.one_hot(share_TE.argmax(-1), E).to(share_TE).mean(0)
        return logits, E * (part_E * share_TE.mean(0)).sum()


def loss_of(out: Any, y: Tensor) -> Tensor:
    if isinstance(out, tuple):
        return expert_ranks.loss_of(out[0], y) + out[1]
    return expert_ranks.loss_of(out, y)


def net(way: Callable[..., Any] = route, kind: type[Net] = Net) -> Any:
    torch.manual_seed(0)
    model = kind().double()
    routed = type("Routed", (Routed,), {"way": staticmethod(way)})
    for block in model.blocks:
        block.__class__ = routed
    return model


def proof(model: Any, *, spoil: Callable[[Any], Any] = nullcontext) -> str:
    """Return what `verify` says of a model under ep."""
    layout: Any = parallelize(model, "ep=2")
    x, y = (t.chunk(2)[dist.get_rank()] for t in batch(0))
    with spoil(layout):
        return repr(layout.verify((x, y), loss_of, steps=1))


@contextmanager
def other_router(layout: Any) -> Iterator[None]:
    """Let rank 1 have another router, as one that each rank makes after `parallelize`."""
    weight = layout.model.get_parameter("blocks.0.router.weight").detach()
    if dist.get_rank() == 1:
        getattr(weight, "_local_tensor", weight).mul_(1.5)
    yield


def undivided(_layout: Any) -> Any:
    return expert_ranks.sums_of_experts()


def counted() -> str:
    """Return what `explain` says where two experts never get a token."""
    layout: Any = parallelize(expert_ranks.make("one-sided"), "ep=2")
    x, _ = (t.chunk(2)[dist.get_rank()] for t in batch(0))
    layout.model(x)
    return repr(layout.explain())


def mistakes() -> dict[str, str]:
    """Return what is said of each mistake, by its name; first of what is none."""
    calls: dict[str, Callable[[], Any]] = {
        "none": lambda: proof(net()),
        "weights left out": lambda: proof(net(without_weights)),
        "no_grad": lambda: proof(net(without_gradients)),
        "noise of its own": lambda: proof(net(with_noise)),
        "capacity by rank": lambda: proof(net(with_capacity)),
        "balance by rank": lambda: proof(net(kind=Balanced)),
        "another router on a rank": partial(proof, net(), spoil=other_router),
        "experts' gradients not divided": partial(proof, net(), spoil=undivided),
        "an expert without tokens": counted,
    }
    return {label: attempt(call) for label, call in calls.items()}
