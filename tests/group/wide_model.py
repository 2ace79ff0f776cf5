"""A GPT wide enough that what it sends is megabytes, so that headers do not count."""

# B batch, T sequence, D model width, V vocabulary, H heads

import torch
from torch import Tensor, nn
from torch.nn import functional as F

B, T, D, V, H = 8, 64, 256, 256, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(D, D), nn.Linear(D, D)
        self.v, self.out = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            part(x_BTD).unflatten(-1, (-1, D // H)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm_1(x_BTD))
        return x_BTD + self.mlp(self.norm_2(x_BTD))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V)

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.token(x_BT) + self.place(torch.arange(x_BT.shape[1]))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x_BT = torch.randint(V, (B, T), generator=random)
    return x_BT, (x_BT * 7 + 3) % V
