"""Small models of torch's own modules, as people write them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.trained import (
    CLASSES,
    WORDS,
    Batch,
    Trained,
    graphs,
    images,
    points,
    series,
    texts,
)


def classified(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def next_word(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def restored(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["x"])


def mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2)), *(nn.Linear(32, CLASSES),)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout2d(0.2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)),
    )


class Residual(nn.Module):
    """Two convolutions and what they were given."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            *(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()),
            *(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.inner(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=4), Residual(8), Residual(8)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)),
    )


class UNet(nn.Module):
    """Down, up, and across."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.middle = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.up = nn.ConvTranspose2d(16, 3, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        low = F.silu(self.down(x))
        return self.up(torch.cat([low, self.middle(low)], 1))


class Recurrent(nn.Module):
    """Words through a recurrent network of two layers."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.inner = kind(16, 16, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.words(x))[0])


class Decoder(nn.Module):
    """A GPT: words and places, masked layers, and the words' own weights to tell the next."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 16), nn.Embedding(32, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        given = self.words(x) + self.places(torch.arange(length))
        return self.head(self.layers(given, mask=mask, is_causal=True))


class Translator(nn.Module):
    """torch's encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.inner = nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        given = self.words(x)
        return self.head(self.inner(given.flip(1), given, tgt_mask=mask))


class Variational(nn.Module):
    """A VAE: draws in its forward, and returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 8), nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.inner(x).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (spread / 2).exp()
        apart = (mean**2 + spread.exp() - 1 - spread).mean()
        return F.mse_loss(self.outer(drawn), x) + 0.1 * apart


class Graph(nn.Module):
    """Two graph convolutions over dense neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        mixing = near / near.sum(-1, keepdim=True)
        return (mixing @ self.second(F.relu(mixing @ self.first(x)))).mean(1)


class Experts(nn.Module):
    """Four experts, of which a sample is sent to one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, CLASSES) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        chosen = F.one_hot(gates.argmax(-1), 4) * gates
        return sum(expert(x) * chosen[:, i : i + 1] for i, expert in enumerate(self.experts))


class Attention(nn.Module):
    """Attention over a series, normalised, and its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return self.head((x + self.inner(normed, normed, normed)[0]).mean(1))


def mixer() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv1d(12, 12, 3, padding=1), nn.InstanceNorm1d(12, affine=True), nn.GELU()),
        *(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(192, CLASSES))),
    )


TORCH = {
    "mlp": Trained(mlp, points, classified),
    "cnn": Trained(cnn, images, classified),
    "resnet": Trained(resnet, images, classified),
    "unet": Trained(UNet, images, restored),
    "lstm": Trained(lambda: Recurrent(nn.LSTM), texts, next_word),
    "gru": Trained(lambda: Recurrent(nn.GRU), texts, next_word),
    "decoder": Trained(Decoder, texts, next_word),
    "translator": Trained(Translator, texts, next_word),
    "vae": Trained(Variational, points, lambda model, batch: model(batch["x"])),
    "gcn": Trained(Graph, graphs, lambda m, b: F.cross_entropy(m(b["x"], b["near"]), b["labels"])),
    "experts": Trained(Experts, points, classified),
    "attention": Trained(Attention, series, classified),
    "mixer": Trained(mixer, series, classified),
}
