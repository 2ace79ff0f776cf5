"""Quantized weights of a library's own class, such as torchao's, as the plain tensors in them.

Such a class implements few operators: what layouts, checkpoints and proofs do with tensors it lets
nobody do. So they do it with its parts, each by a name of its own: "proj.weight" of torchao's int8
is "proj.weight.qdata" and "proj.weight.scale". The whole is made of them for a `state_dict` alone.

One of the modules that hold what nbdist uses of torch's private parts; see `torch_groups.py`. Tried
with torch 2.13.0 (CPU) and torchao 0.18.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    has_protocol = hasattr(DTensor, "__tensor_flatten__")
    return [] if has_protocol else [f"torch {torch.__version__}: __tensor_flatten__ is gone"]


def is_quantized(tensor: object) -> bool:
    """Return whether a tensor consists of others, and not because ranks have parts of it."""
    return is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor)


def stays_whole(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is quantized and frozen: no layout cuts it.

    Most classes do not say how FSDP cuts them, and those that do cut few sizes.
    """
    return is_quantized(parameter) and not parameter.requires_grad


def parts(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by name: of quantized ones what they consist of."""
    return {name: part for key, tensor in named.items() for name, part in _named(key, tensor)}


def plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a quantized one consists of; another by itself."""
    return list(parts({"": tensor}).values())


def empty_like(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return room for such a tensor on a device, without numbers."""
    return _made(tensor, lambda _, part: torch.empty_like(part, device=device))


def joined(
    like: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return tensors like these, of parts by name; without those of which a part is not held."""
    there = {name: t for name, t in like.items() if parts({name: t}).keys() <= held.keys()}
    return {name: _made(t, lambda key, _: held[key], name) for name, t in there.items()}


def _named(key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if not is_quantized(tensor):
        yield key, tensor
        return
    whole: Any = tensor
    for name in whole.__tensor_flatten__()[0]:
        yield from _named(f"{key}.{name}", getattr(whole, name))


def _made(
    tensor: torch.Tensor, make: Callable[[str, torch.Tensor], torch.Tensor], key: str = ""
) -> torch.Tensor:
    if not is_quantized(tensor):
        return make(key, tensor)
    whole: Any = tensor
    names, context = whole.__tensor_flatten__()
    inner = {name: _made(getattr(whole, name), make, f"{key}.{name}") for name in names}
    made: torch.Tensor = type(whole).__tensor_unflatten__(
        inner, context, whole.shape, whole.stride()
    )
    return made
