"""The models of test_advice_search, of different character, and their batches."""

# B samples, T tokens, D width, V words

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from nbdist.study.estimate import TensorShape

V = 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h = self.norm_1(x_BTD)
        q, k, v = (f(h).unflatten(-1, (-1, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.o(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


class Decoder(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(V, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, V)

    def forward(self, x_BT: Tensor) -> Tensor:
        h_BTD = self.words(x_BT)
        for block in self.blocks:
            h_BTD = block(h_BTD)
        return self.head(h_BTD)


class Perceptron(nn.Sequential):
    def __init__(self, layers: int, width: int) -> None:
        blocks = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
        super().__init__(*blocks)


def word_loss(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), y.flatten())


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        name: In a few words.
        machine: Of the virtual ranks.
        model: Makes it, of so many blocks of such a width.
        batch: Shapes of a step's inputs and targets.
        loss: Of outputs and targets.
        memory: Bytes of a device; 0 leaves it what the machine has.
    """

    name: str
    machine: str
    model: partial[Any]
    batch: tuple[TensorShape, TensorShape]
    loss: Callable[..., Any]
    memory: int = 0

    @property
    def blocks(self) -> int:
        return int(self.model.args[0])


def _numbers(samples: int, width: int) -> tuple[TensorShape, TensorShape]:
    x = TensorShape((samples, width), "float32")
    return x, x


def _words(samples: int, tokens: int) -> tuple[TensorShape, TensorShape]:
    x = TensorShape((samples, tokens), "int64")
    return x, x


# A slow link is ten Mbit/s for each 100 MFLOP/s, a fast one forty times that. All are so slow that
# two cores keep up with four devices, which depends on what an operation computes.
SLOW, WIDE, MANY = "60 MFLOP/s, 6 Mbit/s", "200 MFLOP/s, 20 Mbit/s", "40 MFLOP/s, 4 Mbit/s"
FAST, LARGE = "60 MFLOP/s, 240 Mbit/s", "20 MFLOP/s, 80 Mbit/s"
CASES = [
    Case("small MLP, slow link", SLOW, partial(Perceptron, 3, 256), _numbers(64, 256), F.mse_loss),
    Case("wide MLP, slow link", WIDE, partial(Perceptron, 4, 512), _numbers(64, 512), F.mse_loss),
    Case("transformer, fast link", FAST, partial(Decoder, 4, 64), _words(8, 32), word_loss),
    Case("many blocks, slow link", MANY, partial(Decoder, 8, 64), _words(8, 16), word_loss),
    Case("one long sequence", FAST, partial(Decoder, 2, 64), _words(1, 512), word_loss),
    Case("states too large", LARGE, partial(Decoder, 4, 128), _words(4, 16), word_loss, 9_000_000),
]  # fmt: skip
