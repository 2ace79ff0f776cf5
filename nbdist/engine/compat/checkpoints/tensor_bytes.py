"""The bytes of tensors. Any thread."""

import torch


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a contiguous tensor in one dimension, without a copy or a graph.

    A dimension of one element may have any stride, and the tensor counts as contiguous; torch's own
    `view` of another dtype refuses it.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, uint8[nbytes], where they lie."""
    return flat(tensor).view(torch.uint8)
