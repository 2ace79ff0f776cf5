"""Placeholder values of weights while a plan is proven, with almost no memory.

tp, cp, ep and pp prove on the whole model that they compute the same. Which numbers they do it with
does not matter, as long as no two features are equal: each parameter is a view of a short row of
random ones, in which every row of the parameter begins two numbers after the one before it. Of a
stack of matrices one is whole: products in groups take no overlapping rows.
"""

import ctypes
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_LARGE_BYTES = 1 << 20  # a forward copies such a view into one piece, and frees that


@contextmanager
def lent(model: nn.Module, device: torch.device | str) -> Iterator[None]:
    """Replace parameters on meta by stand-ins, the same on every rank; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _stand_in(parameter, len(made), device)
            places.append((module, name, parameter))
    for module, name, parameter in places:
        module._parameters[name] = made[id(parameter)]
    large = {module for module, _, parameter in places if parameter.nbytes > _LARGE_BYTES}
    hooks = [module.register_forward_hook(_give_back) for module in large]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, name, parameter in places:
            module._parameters[name] = parameter
        _give_back()


def _stand_in(parameter: nn.Parameter, seed: int, device: torch.device | str) -> nn.Parameter:
    shape = parameter.shape
    strides = [len(shape) - dim for dim in range(len(shape))]
    if len(shape) == 3:
        strides[1] = max(shape[2], strides[1])
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    scale = math.prod(shape[1:]) ** -0.5 if parameter.numel() else 1.0  # outputs of size 1
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale
    numbers = numbers.to(device, parameter.dtype)
    view = numbers.as_strided(shape, strides) if parameter.numel() else numbers.new_empty(shape)
    # A quantized parameter of whole numbers cannot require a gradient, nor did the one it is for.
    return nn.Parameter(view, requires_grad=parameter.requires_grad)


def _give_back(*_: object) -> None:
    """Return freed memory to the system: glibc keeps what forwards have copied of a weight."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
