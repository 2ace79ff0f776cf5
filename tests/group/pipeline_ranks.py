"""What the ranks run in test_pipeline: parity with one process that sums the same micro-batches."""

# B batch, T sequence, D model width, V vocabulary

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from nbdist.engine.data import data_shard
from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.parallelize import parallelize
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


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": GPT,
    "conv": models.ConvNet,
    "llama": llama,
    "mlp": lambda: nn.Sequential(*[nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(4)]),
}


def make(name: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().to(dtype)


def batch(name: str, step: int, dtype: torch.dtype, size: int = GLOBAL_BATCH) -> Any:
    if name == "conv":
        return models.batch("conv", step, size, dtype)
    random = torch.Generator().manual_seed(1000 + step)
    if name == "mlp":
        x, y = (torch.randn(size, D, generator=random, dtype=dtype) for _ in range(2))
        return x, y
    x_BT = torch.randint(V, (size, T), generator=random)
    return x_BT, (x_BT * 7 + 3) % V


def loss_of(out: Any, y: Tensor) -> Tensor:
    if y.is_floating_point():
        return F.mse_loss(out, y)
    logits = out.logits if hasattr(out, "logits") else out
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def one_process(
    name: str, dtype: torch.dtype, shares: int, max_norm: float | None
) -> tuple[list[list[float]], dict[str, Tensor], list[float]]:
    """Train as one process does that sums the same micro-batches.

    Returns the losses of each share, the final state, and the norms. Running statistics follow the
    first share.
    """
    model = make(name, dtype)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in range(STEPS):
        x, y = batch(name, step, dtype)
        of_step, kept = [], list[Tensor]()
        for x_share, y_share in zip(x.chunk(shares), y.chunk(shares), strict=True):
            parts = zip(x_share.chunk(MICRO), y_share.chunk(MICRO), strict=True)
            of_share = []
            for x_part, y_part in parts:
                loss = loss_of(model(x_part), y_part)
                (loss / (MICRO * shares)).backward()
                of_share.append(loss.detach())
            kept = kept or [buffer.clone() for buffer in model.buffers()]
            of_step.append(float(torch.stack(of_share).mean()))
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.copy_(value)
        if max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        opt.step()
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
        opt.step()
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
                    "has loss": spread.piped is not None and spread.piped.pipe.has_loss,
                }
            )
    return found
