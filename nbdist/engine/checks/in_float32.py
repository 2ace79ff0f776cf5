"""Have a forward that runs again compute in float32.

Weights, buffers and inputs of a lower precision are cast, and autocast is off, also one that a
module enters. What is float32 or more stays as it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from nbdist.engine.compat.torch_autocast import without_autocast
from nbdist.engine.compat.torch_sharded import unit_dtypes
from nbdist.engine.layout.policies import eight_bits
from nbdist.engine.steps.forwards import Forward

_Held = dict[str, Any]  # of a module: its parameters or its buffers


def why_not(model: nn.Module) -> str:
    """Return why a model cannot compute in float32; "" where it can. No collective."""
    if kind := eight_bits.kind_in(model):
        return f"a policy has its Linear layers multiply in {kind}"
    units = unit_dtypes(model)
    low = next((dtype for dtype in units if dtype is not None and _is_low(dtype)), None)
    if low is not None:
        return f"fully_shard gathers its weights in {_name(low)}"
    own = next((p.dtype for p in model.parameters() if _is_low(p.dtype)), None)
    if units and own is not None:
        return f"weights that fully_shard spreads are {_name(own)} themselves"
    return ""


@contextmanager
def in_float32(model: nn.Module) -> Iterator[set[torch.dtype]]:
    """Have a model compute in float32 within the block.

    Gives the dtypes that it has instead, of its tensors, and of each autocast that it enters by
    the end of the block.
    """
    low: set[torch.dtype] = set()
    cast: dict[int, nn.Parameter] = {}  # of DTensors, each once where modules share it
    before: list[tuple[_Held, str, torch.Tensor, torch.Tensor]] = []
    try:
        for held, name, tensor in _low_tensors(model):
            low.add(tensor.dtype)
            before.append((held, name, tensor, tensor.data))
            if isinstance(tensor, DTensor):
                whole = cast.setdefault(id(tensor), nn.Parameter(tensor.detach().float(), False))
                held[name] = whole
            else:  # in place: DDP sends the buffers that it knows
                tensor.data = tensor.data.float()
        with without_autocast(low):
            yield low
    finally:
        for held, name, tensor, data in before:
            held[name] = tensor
            if not isinstance(tensor, DTensor):
                tensor.data = data


def forward_in_float32(forward: Forward, low: set[torch.dtype]) -> Forward:
    """Return a forward with inputs of float32 or more, and without autocast.

    Args:
        forward: As it was called.
        low: The dtypes that it has had instead are added.
    """

    def raised(one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or not _is_low(one.dtype):
            return one
        low.add(one.dtype)
        return one.float()

    low |= {dtype for is_on, dtype in forward.autocast.values() if is_on}
    args, keywords = tree_map(raised, (forward.args, forward.keywords))
    return replace(forward, args=args, keywords=keywords, autocast={})


def names_of(dtypes: set[torch.dtype]) -> list[str]:
    """Return their names, such as `bfloat16`."""
    return sorted(map(_name, dtypes))


def _low_tensors(model: nn.Module) -> Iterator[tuple[_Held, str, torch.Tensor]]:
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and _is_low(tensor.dtype):
                    yield held, name, tensor


def _is_low(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
