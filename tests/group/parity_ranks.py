"""What the ranks run in test_parity: each layout against one process on the same split.

The references know nothing of nbdist: one process sums the gradients of the same parts of the
batch, in the order of the ranks. The noise floor is what rounding alone does to this model in so
many steps: how far the same training comes that begins half a unit of the last place away, the
largest of several; and for float32 how far float64 is. One such sample would be luck. AdamW divides
by the size of a gradient, so that the largest difference is often that of one number whose gradient
is almost nothing: for "gpt" in float64 six samples were 3.6e-15, 8.9e-15, 1.5e-14, 1.7e-14, 9.5e-14
and 9.9e-14. `parity_cases.WITHIN` tells what follows from that.
"""

# B batch, T sequence, V vocabulary

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from nbdist.engine.data.order.shards import data_shard
from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.parallelize import parallelize
from nbdist.shared.errors import LayoutError
from tests.group import models, parity_cases
from tests.group.layout_ranks import whole
from tests.group.parity_cases import Case, Outcome
from tests.group.tensor_parallel_ranks import Block, D, T, V, llama, loss_of

STEPS, GLOBAL_BATCH, MAX_NORM = 4, 16, 0.5
State = dict[str, Tensor]
Trained = tuple[list[float], State]  # the mean loss of each step, and the parameters


class GPT(nn.Module):
    """Four blocks, and a head of its own, so that every axis can cut it."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.token(x_BT) + self.position.weight
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": GPT,
    "conv": models.ConvNet,
    "llama": lambda: llama(heads=8, key_heads=4, layers=4),
}


def run(cases: list[Case]) -> list[Outcome]:
    """Return how far each case, on the ranks there are, lies from one process."""
    reference, noise = cache(_one_process), cache(_noise)
    return [_outcome(case, reference, noise) for case in cases]


def _outcome(
    case: Case, reference: Callable[..., Trained], noise: Callable[..., tuple[float, float]]
) -> Outcome:
    dtype = getattr(torch, case.dtype)
    try:
        losses, state, shards = _train(case, dtype)
    except LayoutError as refusal:
        return Outcome(refused=str(refusal).splitlines()[0])
    parts = shards * case.accumulate * case.microbatches
    same_losses, same = reference(case.model, dtype, parts, case.clip)
    loss_floor, parameters_floor = noise(case.model, dtype, parts, case.clip)
    return Outcome(
        loss=_apart(losses, same_losses),
        parameters=_difference(state, same),
        loss_floor=loss_floor,
        parameters_floor=parameters_floor,
        worst=max(state, key=lambda name: _difference({name: state[name]}, {name: same[name]})),
    )


def _noise(name: str, dtype: torch.dtype, parts: int, clip: bool) -> tuple[float, float]:
    """Return the noise floors of losses and of parameters. Collective: each rank makes samples."""
    losses, state = _one_process(name, dtype, parts, clip)
    samples = range(1 + dist.get_rank(), 1 + parity_cases.SAMPLES, dist.get_world_size())
    others = [_one_process(name, dtype, parts, clip, sample) for sample in samples]
    if dtype != torch.float64 and dist.get_rank() == 0:
        others.append(_one_process(name, torch.float64, parts, clip))
    told: list[Any] = [None] * dist.get_world_size()
    found = [(_apart(losses, other), _difference(state, theirs)) for other, theirs in others]
    dist.all_gather_object(told, found)
    apart, differences = zip(*(pair for theirs in told for pair in theirs), strict=True)
    # A difference is a whole number of roundings, so the floor is one at least.
    eps = torch.finfo(dtype).eps
    return max(eps * max(losses), *apart), max(eps, *differences)


def _apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def _difference(a: State, b: State) -> float:
    """Return the largest difference between two states with the same names."""
    assert a.keys() <= b.keys(), f"names changed: {a.keys() ^ b.keys()}"
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def _make(name: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().to(dtype)


def _batch(name: str, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if name == "conv":
        x, y = models.batch("conv", step, GLOBAL_BATCH, torch.float32)
        return x.to(dtype), y  # the same samples in every dtype
    random = torch.Generator().manual_seed(1000 + step)
    x_BT = torch.randint(V, (GLOBAL_BATCH, T), generator=random)
    return x_BT, (x_BT * 7 + 3) % V


def _loss(name: str) -> Callable[[Any, Tensor], Tensor]:
    return loss_of if name != "conv" else lambda out, y: models.loss_of("conv", out, y)


def _one_process(name: str, dtype: torch.dtype, parts: int, clip: bool, sample: int = 0) -> Trained:
    """Train on the same split: `parts` micro-batches a step, summed one after the other.

    Running statistics of batch norm follow the first part alone, as they follow rank 0. A `sample`
    of rounding other than 0 begins with weights moved by half a unit of their last place.
    """
    model = _make(name, torch.float32).to(dtype)
    if sample:
        move(model, sample)
    opt, loss_fn = torch.optim.AdamW(model.parameters(), lr=1e-3), _loss(name)
    losses = []
    for step in range(STEPS):
        x, y = _batch(name, step, dtype)
        seen: list[float] = []
        kept: list[Tensor] = []
        for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = loss_fn(model(x_part), y_part)
            (loss / parts).backward()
            kept = kept or [buffer.clone() for buffer in model.buffers()]
            seen.append(loss.item())
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.copy_(value)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        opt.step()
        opt.zero_grad()
        losses.append(sum(seen) / parts)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


@torch.no_grad()
def move(model: nn.Module, sample: int) -> None:
    """Move weights by half a unit of their last place, to and fro."""
    random = torch.Generator().manual_seed(sample)
    for parameter in model.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=random) - 0.5
        parameter.add_(parameter * signs.to(parameter) * torch.finfo(parameter.dtype).eps)


def _train(case: Case, dtype: torch.dtype) -> tuple[list[float], State, int]:
    """Train this rank's part. Every rank begins with other weights, of which rank 0's count."""
    model = _make(case.model, torch.float32, seed=dist.get_rank()).to(dtype)
    layout = parallelize(model, case.layout, *parity_cases.policies_of(case))
    opt = layout.optimizer(torch.optim.AdamW, lr=1e-3)
    shard, loss_fn = data_shard(), _loss(case.model)
    losses = []
    for step in range(STEPS):
        x, y = (t.chunk(shard.count)[shard.index] for t in _batch(case.model, step, dtype))
        x_parts, y_parts = x.chunk(case.accumulate), y.chunk(case.accumulate)
        seen: list[float | None] = []
        for part in layout.accumulate(case.accumulate):
            seen.append(_backward(case, layout, x_parts[part], y_parts[part], loss_fn))
        if case.clip:
            layout.clip_grad_norm_(MAX_NORM)
        opt.step()
        opt.zero_grad()
        known = [loss for loss in seen if loss is not None]
        losses.append(_mean_over_ranks(sum(known) if len(known) == len(seen) else None))
    return losses, _whole_state(model), shard.count


def _backward(case: Case, layout: Layout, x: Tensor, y: Tensor, loss_fn: Any) -> float | None:
    """Run one part forward and backward, as a loop would; a pipeline's by `layout.step`."""
    if case.microbatches > 1:
        loss = layout.step(x, y, lambda out, y: loss_fn(out, y) / case.accumulate)
        return None if loss is None else float(loss)
    with loss_parallel() if layout.policies.tensor.loss else nullcontext():
        loss = loss_fn(layout.model(x), y) / case.accumulate
        loss.backward()
    return float(loss.detach())


def _mean_over_ranks(loss: float | None) -> float:
    """Return the mean of the ranks that have one: each data part has as many."""
    told: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, loss)
    there = [value for value in told if value is not None]
    return sum(there) / len(there)


def _whole_state(model: nn.Module) -> State:
    """Return the parameters of all ranks, whole; stages of a pipeline hold some each."""
    mine = {name: whole(p) for name, p in model.named_parameters()}
    told: list[State] = [{}] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    state = {name: value for theirs in told for name, value in theirs.items()}
    for theirs in told:  # who holds the same holds the same numbers
        for name, value in theirs.items():
            assert torch.equal(value, state[name]), f"ranks differ in {name}"
    return state
