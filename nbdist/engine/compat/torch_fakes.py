"""Products in groups on fake tensors, whose shapes torch tells for bfloat16 alone.

On a CPU they run in float32, too, as experts of transformers' models do.

One of the modules that hold what nbdist uses of torch's private parts; see `torch_groups.py`. Tried
with torch 2.13.0 (CPU).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCT: Any = getattr(torch.ops.aten, "_grouped_mm", None)


# What a fake tensor raises that is asked for its numbers.
ASKED_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a shape and no numbers."""
    return isinstance(tensor, FakeTensor)


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    missing = [] if _PRODUCT is not None else ["aten._grouped_mm is gone"]
    return [f"torch {torch.__version__}: {what}" for what in missing]


class _GroupedProducts(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "overloadpacket", None) is not _PRODUCT:
            return func(*args, **kwargs)
        low = [one.to(torch.bfloat16) for one in args[:2]]
        return func(*low, *args[2:], **kwargs).to(args[0].dtype)


@contextmanager
def grouped_products() -> Iterator[None]:
    """Have them, within the block, in any dtype; their numbers are none that count."""
    if _PRODUCT is None:
        yield
        return
    with _GroupedProducts():  # type: ignore[no-untyped-call]
        yield
