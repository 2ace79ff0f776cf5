"""Floating-point operations of what runs, by torch's own table."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from nbdist.engine.compat import torch_dry


class Flops(TorchDispatchMode):
    """Counts those of this thread, of a DTensor those of its local part.

    Attributes:
        total: So far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Carry out an operation, and count."""
        if torch_dry.is_of_parts(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=result)
        return result
