"""Put something around a module's forward, in place: the same module, under the same names.

Around the forward itself and not by hooks, for those do not run when an interrupt ends it; inside
of fsdp's hooks, which gather first. An object and no closure, so that it travels with its module: a
copy of the module calls the copy's forward, `inspect.signature` and `torch.compile` see through it.
"""

from collections.abc import Callable
from typing import Any

from torch import nn


class Around:
    """Replaces a module's forward; the former one is `inner`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # None: the forward of its class, looked up at each call, for the class may change
        # (fully_shard) and a bound method would be found by this object's own name again.
        self._native: Callable[..., Any] | None = module.__dict__.get("forward")
        module.forward = self

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Call the forward."""
        return self.inner(*args, **keywords)

    def inner(self, *args: Any, **keywords: Any) -> Any:
        """Call the former forward."""
        if self._native is not None:
            return self._native(*args, **keywords)
        return type(self._module).forward(self._module, *args, **keywords)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """For `inspect.signature`, by which trainers see what a model takes."""
        native: Callable[..., Any] = type(self._module).forward.__get__(self._module)
        return self._native or native
