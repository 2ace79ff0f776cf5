"""Empty the modules of a model that lie on other ranks: names and classes stay, weights go.

A weight that is not here is a plain tensor of zeros, one number spread over the shape: code that
asks for its shape, dtype or device gets them, and `parameters()` and `state_dict()` hold what this
rank has.
"""

from collections.abc import Collection

import torch
from torch import nn


def empty(model: nn.Module, kept: Collection[str], elsewhere: Collection[str]) -> None:
    """Take away what lies on other ranks, in place.

    Args:
        model: Its parameters.
        kept: Names of the parameters that stay.
        elsewhere: Names of modules that do not run here: their buffers go as well.
    """
    stay = {id(model.get_parameter(name)) for name in kept}
    for _, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) not in stay:
                del module._parameters[name]
                vars(module)[name] = _shape_of(parameter)
    for path in elsewhere:
        for module in model.get_submodule(path).modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    del module._buffers[name]
                    vars(module)[name] = _shape_of(buffer)


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
