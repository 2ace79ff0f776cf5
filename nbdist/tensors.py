"""Rebuild a tensor that travelled: the one place where the notebook's kernel imports torch.

Nothing imports this module until a tensor arrives (`nbdist/payload.py`).
"""

from typing import Any

import torch


def from_bytes(
    raw: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool, is_parameter: bool
) -> torch.Tensor:
    """Return a CPU tensor over `raw`, without a copy.

    Args:
        raw: A writable buffer of exactly the tensor's bytes, in C order.
        dtype: Name of the torch dtype, such as `bfloat16`.
        shape: Its shape.
        requires_grad: Whether it asks for gradients.
        is_parameter: Whether it was an `nn.Parameter`.
    """
    kind = getattr(torch, dtype)
    if len(raw) == 0:
        tensor = torch.empty(shape, dtype=kind)
    else:
        tensor = torch.frombuffer(raw, dtype=torch.uint8).view(kind).reshape(shape)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)
