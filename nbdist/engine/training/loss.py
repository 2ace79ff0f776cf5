"""Tell which root of a backward is a loss."""

import torch

from nbdist.engine.compat.torch_hooks import local_scalar, unscaled


def loss_of(tensors: object) -> torch.Tensor | None:
    """Return the loss that `backward` was called on, unscaled.

    None where it is no loss: several roots, no real scalar, or a sharded one that only a collective
    could tell.
    """
    if not isinstance(tensors, torch.Tensor):
        if not isinstance(tensors, list | tuple) or len(tensors) != 1:
            return None
        tensors = tensors[0]
        if not isinstance(tensors, torch.Tensor):
            return None
    if tensors.numel() != 1 or not tensors.is_floating_point():
        return None
    return local_scalar(unscaled(tensors))
