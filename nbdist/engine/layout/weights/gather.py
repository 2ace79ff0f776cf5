"""Gather a layout's tensors on rank 0, as in the plain model's `state_dict`.

Keys, their order and what is tied are those of the plain model, so that it loads the result with
`strict=True`, and a file of it needs neither ranks nor nbdist. As torch's `get_model_state_dict`
with `full_state_dict` and `cpu_offload`: tensors on the CPU on rank 0, nothing on others.
"""

from collections.abc import Container, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.compat import torch_quantized
from nbdist.engine.layout.weights import full_tensors
from nbdist.engine.layout.weights.full_tensors import LayoutFacts

_TARGET = 0  # the rank that gets it


def state_of(
    spread: LayoutFacts, plain: nn.Module | None, only: Container[str] | None = None
) -> dict[str, Any]:
    """Return the plain model's state on rank 0, an empty dict on others. Collective.

    A rank needs memory for one whole tensor beside its own parts; rank 0 for all of them, on the
    CPU.

    Args:
        spread: The layout of the weights.
        plain: Its skeleton, which knows what is tied on ranks of other stages; None takes the
            model itself, if every rank has it whole.
        only: The names of the tensors to keep, on rank 0; by itself all.
    """
    is_target = dist.get_rank() == _TARGET
    held: dict[str, torch.Tensor] = {}
    for name, full in full_tensors.tensors(spread):
        if is_target and (only is None or name in only):
            held[name] = full.to("cpu", copy=True)
    if not is_target:
        return {}
    found = _named(held, spread.model, plain or spread.model)
    kept = {id(tensor) for tensor in held.values()}
    return found if only is None else {key: t for key, t in found.items() if id(t) in kept}


def _named(held: Mapping[str, torch.Tensor], model: nn.Module, plain: nn.Module) -> dict[str, Any]:
    """Return tensors by the keys of the plain model's state, a tied one under each of its names."""
    by_identity = {
        id(tensor): held[name] for name, tensor in full_tensors.names(plain).items() if name in held
    }
    names = full_tensors.names(plain, duplicates=True)
    known = {name: by_identity[id(t)] for name, t in names.items() if id(t) in by_identity}
    state = plain.state_dict()
    whole = torch_quantized.joined(state, known)
    # What is no parameter or buffer (`get_extra_state`) is as rank 0 has it.
    own = model.state_dict()
    return {key: whole.get(key, own.get(key)) for key in state if key in whole or key in own}
