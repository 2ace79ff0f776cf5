"""What a model of the library is trained on: its samples, its loss, and how it is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WORDS = 64  # of a vocabulary
LENGTH = 12  # positions of a text
CLASSES = 4

Samples = dict[str, Tensor]  # the first dimension of each counts them
Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Trained:
    """What is trained.

    Attributes:
        make: Builds the model, with random weights.
        samples: Draws so many samples.
        loss: Returns the loss of a batch of these.
        library: The one that has to be there, if any.
    """

    make: Callable[[], nn.Module]
    samples: Callable[[int], Samples]
    loss: Callable[[nn.Module, Batch], Tensor]
    library: str = "torch"


def texts(count: int) -> Samples:
    """Draw texts, each position's word following from the one before: (count, LENGTH)."""
    x = (torch.randint(0, WORDS, (count, 1)) + 3 * torch.arange(LENGTH)) % WORDS
    return {"x": x, "labels": x.roll(-1, 1)}


def images(count: int, size: int = 32) -> Samples:
    """Draw images (count, 3, size, size) and their classes."""
    return {"x": torch.randn(count, 3, size, size), "labels": torch.randint(0, CLASSES, (count,))}


def points(count: int) -> Samples:
    """Draw vectors (count, 16) and their classes."""
    return {"x": torch.randn(count, 16), "labels": torch.randint(0, CLASSES, (count,))}


def series(count: int) -> Samples:
    """Draw sequences (count, LENGTH, 16) and their classes."""
    x = torch.randn(count, LENGTH, 16)
    return {"x": x, "labels": torch.randint(0, CLASSES, (count,))}


def graphs(count: int) -> Samples:
    """Draw graphs of 8 nodes: features (count, 8, 16), who is near whom, and their classes."""
    near = (torch.rand(count, 8, 8) > 0.5).float()
    near = (near + near.mT + torch.eye(8)).clamp(max=1.0)
    x = torch.randn(count, 8, 16)
    return {"x": x, "near": near, "labels": torch.randint(0, CLASSES, (count,))}
