"""A snapshot as it travels to a peer: what it is of, and the bytes of its tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nbdist.engine.compat.checkpoints import tensor_bytes
from nbdist.engine.recovery.decide import Steps


@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot without the tensors' bytes.

    Attributes:
        steps: Of the unit's optimizers.
        at: `time.time()` when it was taken.
        frame: As of `model_state.read`.
        metas: Shape and dtype of each tensor.
        random: The states of the generators at that boundary, for `StepState`.
        fixed: Names the version of what no optimizer changes; None where there is nothing.
    """

    steps: Steps
    at: float
    frame: Any
    metas: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    random: Any
    fixed: int | None = None


def metas_of(tensors: Sequence[torch.Tensor]) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Return shape and dtype of each tensor."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU; its own, where it is contiguous."""
    array: Any = tensor_bytes.raw(tensor.contiguous()).numpy()
    return memoryview(array)


def tensors_of(saved: Saved, body: bytearray) -> list[torch.Tensor]:
    """Return copies of the tensors whose bytes follow each other in `body`."""
    found, begin = [], 0
    for shape, dtype in saved.metas:
        size = torch.Size(shape).numel() * dtype.itemsize
        flat = torch.empty(size, dtype=torch.uint8)
        if size:
            flat.copy_(torch.frombuffer(body, dtype=torch.uint8, count=size, offset=begin))
        found.append(flat.view(dtype).view(shape))
        begin += size
    return found
