"""A copy of the plain model without its weights, from before it was spread.

Weights are on the meta device, where they take no memory, and so are large buffers. All else is a
separate copy, so that changes of the live model do not reach it.
"""

import copy
from typing import Any

import torch
from torch import nn

from nbdist.engine.compat import torch_quantized
from nbdist.shared.error_text import named

LARGEST_BUFFER_BYTES = 1 << 20  # larger ones are left out; `full_tensors` can gather them


def copy_without_weights(model: nn.Module) -> tuple[nn.Module | None, str]:
    """Return (the copy, ""), or (None, why there is none). No collective; changes nothing.

    Tied parameters stay tied; modes, flags and hooks of the user are copied.
    """
    try:
        memo: dict[int, Any] = {id(p): on_meta(p) for p in model.parameters()}
        for buffer in model.buffers():
            if buffer.nbytes > LARGEST_BUFFER_BYTES:
                memo[id(buffer)] = torch.empty_like(buffer, device="meta")
        return copy.deepcopy(model, memo), ""
    except Exception as error:
        return None, f"{type(model).__name__} cannot be copied: {named(error)}"


def take_weights(model: nn.Module) -> None:
    """Put every parameter of a model on the meta device, in place; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = on_meta(parameter)
                module._parameters[name] = made[id(parameter)]


def materialise(model: nn.Module, device: torch.device | str) -> None:
    """Give parameters and buffers on meta room on a device, without numbers; tied ones stay tied.

    `Module.to_empty` unties them.
    """
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                room = torch_quantized.empty_like(parameter.detach(), device)
                made[id(parameter)] = nn.Parameter(room, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                there = torch.empty_like(buffer, device=device) if buffer.is_meta else None
                module._buffers[name] = buffer.to(device) if there is None else there


def on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter without numbers, with the marks that a library has put on it."""
    empty = nn.Parameter(
        torch_quantized.empty_like(parameter.detach(), "meta"),
        requires_grad=parameter.requires_grad,
    )
    vars(empty).update({k: mark for k, mark in vars(parameter).items() if k not in vars(empty)})
    return empty
