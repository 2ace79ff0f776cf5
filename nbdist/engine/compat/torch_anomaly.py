"""What torch keeps of the operations of a backward: when and where each was made. Any thread."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import Node


def tracebacks() -> AbstractContextManager[Any]:
    """Have operations keep where they are made, within the block; nothing is checked or warned."""
    return torch.autograd.set_detect_anomaly(True, check_nan=False)


def made_at(node: Node) -> list[str]:
    """Return where an operation was made within `tracebacks`: frames as text, outermost first."""
    metadata: Any = node.metadata  # a dict, which torch's types take for a method
    return list(metadata.get("traceback_", ()))


def number_of(node: Node) -> int:
    """Return its number, in the order in which a thread makes them; what adds to a leaf has 2^64-1.

    Of `next_number`'s, where the same thread made it.
    """
    return node._sequence_nr()


def next_number() -> int:
    """Return the number of the operation that this thread makes next."""
    return int(torch._C._autograd._get_sequence_nr())


def act_in_backward(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether any goes to a hook once it has its gradient: an optimizer may step there."""
    held: Iterable[Any] = parameters
    return any(one._post_accumulate_grad_hooks for one in held)
