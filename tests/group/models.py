"""Two small models that stand for many: a GPT with tied embeddings, a ResNet with batch norm."""

# B batch, T sequence, D model width, V vocabulary, C channels

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

V, T, D = 31, 12, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        # No bias: a key's bias has no effect, and AdamW blows its rounding up to a full step.
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, d = x_BTD.shape
        qkv = self.qkv(self.norm_1(x_BTD)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.token(x_BT) + self.position.weight
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm_2(self.conv_2(F.relu(self.norm_1(self.conv_1(x))))))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.layer_1 = nn.Sequential(Residual(8), Residual(8))
        self.widen = nn.Conv2d(8, 12, 3, stride=2)
        self.layer_2 = nn.Sequential(Residual(12), Residual(12))
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer_2(self.widen(self.layer_1(self.stem(x))))
        return self.head(x.mean((2, 3)))


def make(name: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """Return the model `name`, with the same weights for the same seed."""
    torch.manual_seed(seed)
    return {"gpt": GPT, "conv": ConvNet}[name]().to(dtype)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return each parameter's gradient by name; all of them have one."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name] = parameter.grad
    return found


def synchronize(model: nn.Module, is_on: bool) -> None:
    """Switch the averaging of gradients on or off, by the method that a layout gives its model."""
    cast(FSDPModule, model).set_requires_gradient_sync(is_on)


def batch(name: str, step: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return one global batch of inputs and targets."""
    random = torch.Generator().manual_seed(1000 + step)
    if name == "gpt":
        x_BT = torch.randint(V, (size, T), generator=random)
        return x_BT, (x_BT * 7 + 3) % V
    y = torch.randint(10, (size,), generator=random)
    return torch.randn(size, 1, 8, 8, generator=random, dtype=dtype) + y[:, None, None, None], y


def loss_of(name: str, out: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross entropy."""
    if name == "gpt":
        out, y = out.flatten(0, 1), y.flatten()
    return F.cross_entropy(out, y)
