"""Tell whether an object has moved, by a mark of it: a few numbers, and versions of its tensors.

Main thread.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nbdist.engine.compat import torch_modules, torch_quantized
from nbdist.engine.steps.followers.find_followers import MOST_ITEMS, PLAIN, has_state, loose_tensors

Mark = tuple[object, ...]

_MOST_LEAVES = 32  # numbers and tensors in a mark
_MOST_TENSORS = 12
_MOST_VALUES = 4  # tensors of a mark that are looked into: `.data` writes without a new version


def mark(one: Any) -> Mark:
    """Return what tells a move of an object: a few of its numbers, and the versions of tensors."""
    leaves: list[object] = []
    seen: set[int] = set()
    tensors = values = 0
    todo: list[Any] = [one] if has_state(one) else loose_tensors(one)
    if isinstance(one, torch.amp.GradScaler):
        todo = torch_modules.scaler_tensors(one)  # the rest is of the step that runs
    while todo and len(leaves) < _MOST_LEAVES and tensors < _MOST_TENSORS:
        item = todo.pop()
        kind = type(item)
        if kind in (int, float, bool, str) or item is None:
            leaves.append(item if item == item else "nan")
        elif isinstance(item, torch.Tensor):
            leaves.append((id(item), item._version))
            tensors += 1
            if values < _MOST_VALUES and (value := _first(item)) is not None:
                values += 1
                leaves.append(value)
        elif isinstance(item, (*PLAIN, torch.optim.Optimizer)) or id(item) in seen:
            continue
        else:
            seen.add(id(item))
            todo.extend(reversed(list(itertools.islice(_held(item), MOST_ITEMS))))
    return tuple(leaves)


def hides_writes(one: Any) -> bool:
    """Return whether writes may not show in a mark: through `.data` of tensors on a device."""
    tensors: list[torch.Tensor] = []
    if isinstance(one, nn.Module):
        tensors = [*one.parameters(), *one.buffers()]
    elif isinstance(one, dict | list) or hasattr(one, "__dict__"):
        tensors = loose_tensors(one)
    return any(tensor.device.type != "cpu" for tensor in tensors)


def _held(item: Any) -> Iterator[Any]:
    if isinstance(item, dict):
        yield from list(item.values())
    elif isinstance(item, list | tuple | deque):
        yield from item
    elif isinstance(item, nn.Module):
        yield from list(item._buffers.values())
        yield from list(item._parameters.values())
        yield from list(item._modules.values())
        yield from (v for n, v in list(vars(item).items()) if not n.startswith("_"))
    elif hasattr(item, "__dict__"):
        yield from list(vars(item).values())


def _first(tensor: torch.Tensor) -> float | None:
    """Return a tensor's first value where that waits for no device."""
    tensor = torch_quantized.plain(getattr(tensor, "_local_tensor", tensor))[0]
    if tensor.device.type != "cpu" or not tensor.numel() or tensor.layout is not torch.strided:
        return None
    value = tensor.detach()[(0,) * tensor.dim()].item()
    return value if value == value else -1.0
