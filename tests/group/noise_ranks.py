"""What one rank runs in test_noise: right gradients, added in another order, and their floors."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nbdist.engine.layout.verify.reference import Part, Reference
from nbdist.engine.layout.verify.report import allowances

D = 32
aten = torch.ops.aten


class Halves(TorchDispatchMode):
    """Sums each product of matrices in two halves, as tp does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.mm.default:
            return self._product(*args)
        if func is aten.addmm.default and not kwargs:
            return self._product(*args[1:]) + args[0]
        return func(*args, **(kwargs or {}))

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        half = a.shape[1] // 2
        return aten.mm(a[:, :half], b[:half]) + aten.mm(a[:, half:], b[half:])


class Gains(nn.Module):
    """Parameters of one number: gains, shifts and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(D, 2 * D) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(2 * D, D) for _ in range(4))
        self.gain = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(4))
        self.shift = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(4))
        self.head, self.temperature = nn.Linear(D, 10), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for up, down, gain, shift in zip(self.up, self.down, self.gain, self.shift, strict=True):
            x = x + gain * down(F.gelu(up(F.layer_norm(x, (D,))) + shift))
        return self.head(x) * self.temperature


def furthest(seeds: range, dtype: torch.dtype) -> tuple[float, str]:
    """Return the largest share of what is allowed, over models, with its tensor and seed."""
    return max(share for seed in seeds for share in _shares(seed, dtype))


def _shares(seed: int, dtype: torch.dtype) -> list[tuple[float, str]]:
    torch.manual_seed(seed)
    model = Gains().to(dtype)
    batch = torch.randn(16, D).to(dtype), torch.randint(10, (16,))

    def loss_of(model: nn.Module, piece: Any) -> Tensor:
        return F.cross_entropy(model(piece[0]), piece[1])

    reference = Reference(model, loss_of, [Part([batch], 1.0)])
    noise = reference.step(1)
    del noise["loss 0"]
    expected = {name: gradient.clone() for name, gradient in reference.gradients.items()}
    model.zero_grad()
    with Halves():
        loss_of(model, batch).backward()
    allowed = allowances(noise, torch.finfo(dtype).eps)
    return [
        (float((p.grad - expected[name]).abs().max()) / allowed[name], f"{name}, seed {seed}")
        for name, p in model.named_parameters()
        if p.grad is not None
    ]
