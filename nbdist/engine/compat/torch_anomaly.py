"""What torch keeps of the operations of a backward: when and where each was made. Any thread."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.autograd.graph import Node

Hook = TypeVar("Hook", bound=Callable[..., Any])
_LOOKS_ON = "_nbdist_looks_on"


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
    """Return whether any goes to a hook once it has its gradient: an optimizer may step there.

    Hooks that `looks_on` has marked do nothing to it.
    """
    held: Iterable[Any] = parameters
    hooks = (hook for one in held for hook in (one._post_accumulate_grad_hooks or {}).values())
    return any(not getattr(hook, _LOOKS_ON, False) for hook in hooks)


def looks_on(hook: Hook) -> Hook:
    """Mark a function as a hook that changes neither a gradient nor a parameter."""
    setattr(hook, _LOOKS_ON, True)
    return hook
