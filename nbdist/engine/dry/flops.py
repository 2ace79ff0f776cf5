"""Floating-point operations of what runs, by torch's own table, and how many are launched."""

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from nbdist.engine.compat import torch_dry

# Attention as CPUs compute it, and so what runs without numbers: torch's table has its kin alone.
_ATTENTION = "_scaled_dot_product_flash_attention"
_OF_CPUS = {
    getattr(torch.ops.aten, f"{_ATTENTION}_for_cpu{end}"): getattr(torch.ops.aten, _ATTENTION + end)
    for end in ("", "_backward")
}


class Flops(TorchDispatchMode):
    """Counts those of this thread, of a DTensor those of its local part.

    Attributes:
        total: So far.
        launches: Operations so far that compute or copy; views and new tensors do neither.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.launches = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Carry out an operation, and count."""
        if torch_dry.is_of_parts(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.launches += _is_launched(func)
        name = func.overloadpacket
        count = flop_registry.get(_OF_CPUS.get(name, name))
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=result)
        return result


@functools.cache
def _is_launched(func: Any) -> bool:
    results = func._schema.returns
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in results)
    makes_tensors = any("Tensor" in str(r.type) for r in results)
    name = func.overloadpacket.__name__
    return makes_tensors and not (is_view or "empty" in name or name == "_unsafe_view")
