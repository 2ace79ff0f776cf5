"""Fingerprints of tensors: one number for all bits, cheap enough to take while training.

The bit patterns are summed as whole numbers, which is exact, so equal tensors have equal
fingerprints on any machine, and any single value that differs gives another one. Of large tensors
a fixed selection is summed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

SELECTION = 1 << 20  # elements of one tensor that are read: some 0.2 ms on a CPU
_DIGITS = 52  # bits that a float of the wire holds exactly
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Return one int64 a tensor, on the CPU or, of tensors on a GPU, still there.

    Args:
        tensors: Plain and not empty, all on one device.
    """
    return torch.stack([_sum_of_bits(tensor.detach()) for tensor in tensors])


def as_float(fingerprint: int) -> float:
    """Return a fingerprint as a float that holds it exactly."""
    return float(fingerprint & ((1 << _DIGITS) - 1))


def _sum_of_bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.reshape(-1)
    if flat.numel() > SELECTION:
        flat = flat[:: -(-flat.numel() // SELECTION)].contiguous()
    return flat.view(_WHOLE[flat.element_size()]).sum(dtype=torch.int64)
