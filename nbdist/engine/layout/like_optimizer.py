"""A new optimizer like the user's: its class, options and plain attributes, without its states.

What an optimizer keeps on itself beside its groups (`self.trust = True`) decides what it does, too.
Hooks of its steps are not taken over: what they refer to is the user's own.

Main thread.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from nbdist.engine.compat import torch_live

_OWN_OF_TORCH = frozenset(("defaults", "state", "param_groups"))
_PLAIN = (bool, int, float, str, type(None))


def made_like(
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    make: Callable[..., Optimizer] | None = None,
) -> Optimizer:
    """Return an optimizer of these groups; recovery has nothing to do with it.

    Args:
        optimizer: The one that it is like.
        groups: With `params` and options.
        make: Makes it of groups and options, in place of the class.

    Raises:
        Exception: What the constructor raises, such as where it asks for more.
    """
    kind = type(optimizer)
    asked = inspect.signature(kind).parameters
    options = {name: value for name, value in groups[0].items() if name in asked}
    options.pop("params", None)
    with torch_live.here.unseen():
        made = (make or kind)([dict(group) for group in groups], **options)
    inner = getattr(made, "optim", made) if make is not None else made
    vars(inner).update(_attributes(optimizer))
    return made


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _OWN_OF_TORCH and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    return type(value) in _PLAIN
