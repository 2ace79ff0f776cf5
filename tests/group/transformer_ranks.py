"""What the ranks run in test_transformer: torch's own transformer modules under tp, pp and cp."""

# B batch, T sequence, D model width, V vocabulary

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.policies.policies import ContextParallel, Pipeline
from nbdist.shared import collectives
from nbdist.shared.errors import LayoutError
from tests.group import models
from tests.group.layout_ranks import calls_of, whole
from tests.group.pipeline_ranks import furthest, gradients

V, T, D = 12, 6, 16


class Encoder(nn.Module):
    """Token ids through `nn.TransformerEncoder`; 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        layer = nn.TransformerEncoderLayer(D, 2, 2 * D, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def encode(self, x_BT: Tensor) -> Tensor:
        return self.encoder(self.token(x_BT))

    def forward(self, x_BT: Tensor) -> Tensor:
        return self.head(self.encode(x_BT))


class Masked(Encoder):
    """torch finds out by its numbers that the mask is causal."""

    def encode(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.token(x_BT)
        mask = nn.Transformer.generate_square_subsequent_mask(x_BT.shape[1], dtype=x_BTD.dtype)
        return self.encoder(x_BTD, mask=mask)


class Padded(Encoder):
    """In evaluation torch packs the samples without their padding."""

    def encode(self, x_BT: Tensor) -> Tensor:
        return self.encoder(self.token(x_BT), src_key_padding_mask=x_BT == 0)


class Both(nn.Module):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.both = nn.Transformer(D, 2, 2, 2, 2 * D, dropout=0.0, batch_first=True)

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.token(x_BT)
        mask = nn.Transformer.generate_square_subsequent_mask(x_BT.shape[1], dtype=x_BTD.dtype)
        return self.head(self.both(x_BTD, x_BTD, tgt_mask=mask))


class Attending(Encoder):
    """torch's attention with all that it can be asked; by_head is called twice."""

    def __init__(self) -> None:
        super().__init__()
        both = {"add_bias_kv": True, "add_zero_attn": True}
        self.own = nn.MultiheadAttention(D, 2, batch_first=True, **both)
        self.other = nn.MultiheadAttention(D, 4, kdim=6, vdim=10)
        self.by_head = nn.MultiheadAttention(D, 2, bias=False, batch_first=True)

    def encode(self, x_BT: Tensor) -> Tensor:
        x = self.token(x_BT)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        made, mean = self.own(x, x, x, key_padding_mask=x_BT == 0, attn_mask=later)
        x = x + made + mean[..., : x.shape[1]] @ x
        s = x.transpose(0, 1)
        x = x + self.other(s, s[..., :6], s[..., 6:], need_weights=False)[0].transpose(0, 1)
        far = later.to(x.dtype) * torch.arange(2 * len(x), dtype=x.dtype)[:, None, None]
        made, weights = self.by_head(x, x, x, attn_mask=-far, average_attn_weights=False)
        return x + made + weights[:, 1] @ x + self.by_head(x[0], x[0], x[0])[0]


class MaskedPadded(Encoder):
    """A mask of bool, and padding in it."""

    def encode(self, x_BT: Tensor) -> Tensor:
        mask = torch.ones(2 * [x_BT.shape[1]], dtype=torch.bool).triu(1)
        return self.encoder(self.token(x_BT), mask=mask, src_key_padding_mask=x_BT == 0)


class Asking(nn.Module):
    """Asks for weights as is usual, and does not use them; a mask for each head; tokens first."""

    uses: tuple[str, ...] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.blocks = nn.ModuleList(AskingBlock(self.uses, options) for _ in range(2))

    def forward(self, x_BT: Tensor) -> Tensor:
        x_TBD = self.token(x_BT).transpose(0, 1)
        near = torch.linspace(0, 1, x_BT.numel() * 2 * x_BT.shape[1], dtype=x_TBD.dtype)
        mask = near.view(-1, x_BT.shape[1], x_BT.shape[1])
        for block in self.blocks:
            x_TBD = block(x_TBD, mask)
        return self.head(x_TBD.transpose(0, 1))


class AskingBlock(nn.Module):
    def __init__(self, uses: tuple[str, ...], options: dict[str, Any]) -> None:
        super().__init__()
        self.uses = uses
        self.attention, self.norm = nn.MultiheadAttention(D, 2, **options), nn.LayerNorm(D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mixed, weights = self.attention(x, x, x, attn_mask=mask)
        if self.uses:
            mixed = mixed * weights.mean()
        return self.norm(x + mixed)


class Using(Asking):
    uses = ("weights",)


class Own(Asking):
    """Adds a key to those of the sequence."""

    def __init__(self) -> None:
        super().__init__(add_zero_attn=True)


class Translating(Both):
    """Texts of two lengths, with padding in both."""

    def forward(self, x_BT: Tensor) -> Tensor:
        from_BS = torch.cat([x_BT, x_BT[:, 2:] * 5 % V], 1)
        given, wanted = self.token(from_BS), self.token(x_BT)
        mask = nn.Transformer.generate_square_subsequent_mask(x_BT.shape[1], dtype=given.dtype)
        padding = {"src_key_padding_mask": from_BS == 0, "tgt_key_padding_mask": x_BT == 0}
        return self.head(
            self.both(given, wanted, tgt_mask=mask, memory_key_padding_mask=from_BS == 0, **padding)
        )


class Deciding(Encoder):
    """Its own code decides by a number."""

    def encode(self, x_BT: Tensor) -> Tensor:
        if x_BT.sum() > 3:
            return super().encode(x_BT)
        return self.token(x_BT)


ULYSSES, GATHER = ContextParallel(), ContextParallel("gather")


def make(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def batch() -> tuple[Tensor, Tensor]:
    x_BT = torch.randint(1, V, (4, T), generator=torch.Generator().manual_seed(1))
    x_BT[1:3, 4:] = 0
    return x_BT, x_BT * 5 % V


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    """Leave padding out: what torch makes of it in evaluation depends on how it is packed."""
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=0)


def loss_of_all(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def parity(
    kind: type[nn.Module],
    layout: str,
    *policies: Any,
    of: Callable[[Tensor, Tensor], Tensor] = loss_of,
) -> tuple[float, float]:
    """Return how far gradients and a loss in evaluation are from one process's."""
    alone = make(kind)
    if "pp" in layout:
        policies = (Pipeline(microbatches=2),)
    live = parallelize(make(kind), layout, *policies)
    x, y = batch()
    live.step(x, y, of)
    of(alone(x), y).backward()
    in_gradients = furthest(gradients(live.model), gradients(alone))
    for model in (alone, live.model):
        model.eval()
    with torch.no_grad():
        loss, expected = live.step(x, y, of), of(alone(x), y)
    return in_gradients, 0.0 if loss is None else abs(float(whole(loss) - expected))


def refused(kind: type[nn.Module], layout: str) -> str:
    try:
        parallelize(make(kind), layout)
    except LayoutError as error:
        return str(error)
    return "accepted"


def on_two_ranks() -> dict[str, Any]:
    """One group for all that two ranks prove."""
    kinds: list[type[nn.Module]] = [Encoder, Masked, Padded]
    found: dict[str, Any] = {
        f"{kind.__name__} {layout}": parity(kind, layout)
        for kind in kinds
        for layout in ("tp=2", "pp=2")
    }
    found |= {f"Both {layout}": parity(Both, layout) for layout in ("tp=2", "pp=2")}
    found["Attending tp=2"] = parity(Attending, "tp=2")
    found["explained"] = repr(parallelize(make(Attending), "tp=2").explain())
    for kind, layout in REFUSED:
        found[f"{kind.__name__} {layout} refused"] = refused(kind, layout)
    return found | {f"{kind.__name__} cp=2": parity(kind, "cp=2", ULYSSES) for kind in EVERY_TIME}


def cut_in_every_way() -> dict[str, tuple[float, float]]:
    found = {
        f"{kind.__name__} {policy}": parity(kind, "cp=2", policy)
        for kind in (*EVERY_TIME, Encoder, Masked, Padded, Both)
        for policy in (ULYSSES, GATHER)
    }
    for kind in (Masked, Asking, Both):
        for method in ("ulysses", "gather"):
            policy = ContextParallel(method, loss=True)
            found[f"{kind.__name__} {policy}"] = parity(kind, "cp=2", policy, of=loss_of_all)
    return found


def sent_bytes(method: str) -> tuple[float, float]:
    """Return bytes a rank sends in forward and backward, as the tap counts, and as explained."""
    model = make(Both).float()
    layout = parallelize(model, "cp=2", ContextParallel(method))
    models.synchronize(model, False)  # what is left is cp's own
    x, y = batch()
    called = calls_of(lambda: loss_of(model(x), y).backward())
    sent = sum(collectives.sent_bytes(call.kind, call.bytes, 2, "gloo") for call in called)
    assert layout.context is not None
    return sent, layout.context.token_bytes * x.numel()


REFUSED: list[tuple[type[nn.Module], str]] = [
    (Using, "cp=2"),
    (Own, "cp=2"),
    (Deciding, "tp=2"),
    (Deciding, "pp=2"),
]
EVERY_TIME = (MaskedPadded, Asking, Translating)
