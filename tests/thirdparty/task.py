"""A small regression that every library is given, and what one process would have made of it.

Runs on the ranks, where it is a cell, and in the tests, which replay there what the ranks saw.
The first feature of a sample is its number, so that a model's input tells which samples it got.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

N = 32
LR = 0.1
_random = torch.Generator().manual_seed(0)
X = torch.randn(N, 8, generator=_random)
X[:, 0] = torch.arange(N) / N
Y = X @ torch.randn(8, 1, generator=_random)


def fresh(seed: int = 1) -> nn.Sequential:
    """Return the model, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def watch(model: nn.Module) -> list[list[int]]:
    """Return a list that grows by the numbers of the samples of each forward in training."""
    seen: list[list[int]] = []

    def note(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if module.training:
            seen.append((inputs[0][:, 0] * N).round().int().tolist())

    model.register_forward_pre_hook(note)
    return seen


def flat(model: nn.Module) -> torch.Tensor:
    """Return all parameters in one row; collective where they are shards."""
    parts = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def replay(batches: list[list[int]], clip: float | None = None) -> torch.Tensor:
    """Return the parameters after one process has trained on these batches.

    `clip` is the norm that its gradients may have.
    """
    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for batch in batches:
        loss = nn.functional.mse_loss(model(X[batch]), Y[batch])
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return flat(model)
