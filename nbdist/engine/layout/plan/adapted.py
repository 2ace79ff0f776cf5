"""Layers that an adapter wraps: LoRA, DoRA, IA3 and what else PEFT has, or a class written so.

A wrapper holds the layer that it adapts as `base_layer`, takes its input and changes its output.
Its parameters lie as the layer's weight does: dim 0 are outputs, dim 1 are inputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_BASE = "base_layer"


def layer_in(module: nn.Module) -> nn.Module | None:
    """Return the layer that a wrapper adapts, through all wrappers; None of other modules."""
    layer = module._modules.get(_BASE)
    while layer is not None and (inner := layer._modules.get(_BASE)) is not None:
        layer = inner
    return layer


def layer_of(module: nn.Module) -> nn.Module:
    """Return the layer that a wrapper adapts; other modules themselves."""
    return layer_in(module) or module


def wrappers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost wrappers of a model, by name."""
    last = None
    for name, module in model.named_modules():
        is_inside = last is not None and name.startswith(last + ".")
        if not is_inside and layer_in(module) is not None:
            last = name
            yield name, module


@contextmanager
def all_active(model: nn.Module) -> Iterator[None]:
    """Have a forward run through all adapters that a model has, in the place of the chosen one.

    Which one is chosen is an attribute of each wrapper: the caller puts those back.
    """
    trained = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for _, module in wrappers(model):
            wrapper: Any = module
            kinds = getattr(wrapper, "adapter_layer_names", ())
            found = [name for kind in kinds for name in getattr(wrapper, kind, {})]
            named = [name for name in found if isinstance(name, str)]
            if named and callable(getattr(wrapper, "set_adapter", None)):
                wrapper.enable_adapters(True)
                wrapper.set_adapter(list(dict.fromkeys(named)))
        yield
    finally:
        for parameter, was in trained:
            parameter.requires_grad_(was)


def follow(plain: nn.Module, live: nn.Module) -> None:
    """Have a copy of a model use the adapters that the model uses: chosen, merged or disabled.

    Of a pipeline's stage, the rest of the copy follows the layers that are there: all are switched
    together.

    Args:
        plain: From before `set_adapter`, `disable_adapter` or `merge_adapter`.
        live: Its modules have the same names, but may be fewer.
    """
    held = dict(_switched(live))
    for name, module in _switched(plain):
        like = held.get(name) or next(iter(held.values()), None)
        if like is None:
            continue
        module.enable_adapters(True)
        module.set_adapter(list(like.active_adapters))
        module.enable_adapters(not like.disable_adapters)
        if hasattr(like, "merged_adapters"):
            module.merged_adapters = list(like.merged_adapters)


def _switched(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules that PEFT switches, by name: wrappers, and those that it trains whole."""
    for name, module in model.named_modules():
        if isinstance(getattr(type(module), "disable_adapters", None), property):
            yield name, module


def in_use(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters that a wrapper adds, by name, with numbers as after some training.

    New ones are zeros or ones, with which an adapter changes nothing, right or wrong.
    """
    layer = layer_in(module)
    own = set() if layer is None else {id(p) for p in layer.parameters()}
    added = {name: p.detach() for name, p in module.named_parameters() if id(p) not in own}
    return {name: p + _wave(p) for name, p in added.items()}


def _wave(like: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(like.numel(), device=like.device, dtype=torch.float32)
    return (steps.sin() / 10).view(like.shape).to(like.dtype)
