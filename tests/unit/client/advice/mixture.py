"""A model with experts in stacks, for the process of estimates."""

# B samples, T tokens of all, D width, E experts

import torch
from torch import Tensor, nn
from torch.nn import functional as F

V, D, E, INSIDE = 50, 32, 8, 64


class Experts(nn.Module):
    """Each computes all tokens, of which those count that have chosen it: no number decides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, D, INSIDE) / D)
        self.down = nn.Parameter(torch.randn(E, INSIDE, D) / D)

    def forward(self, h_TD: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        made = torch.zeros_like(h_TD)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            share = (weight * (index == expert)).sum(1, keepdim=True)
            made = made + share * (F.relu(h_TD @ up) @ down)
        return made


class Mixture(nn.Module):
    """Two experts a token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, E), Experts()

    def forward(self, x: Tensor) -> Tensor:
        h_TD = x.flatten(0, -2)
        weight, index = self.gate(h_TD).softmax(-1).topk(2)
        return x + self.experts(h_TD, index, weight).view_as(x)


def make() -> nn.Module:
    """Return two mixtures between words and a head."""
    return nn.Sequential(nn.Embedding(V, D), Mixture(), Mixture(), nn.Linear(D, V))
