"""Shortcuts of torch's own transformer modules, which are not taken while a forward is looked at.

`nn.TransformerEncoder` compares a mask with the causal one by its numbers, which fake tensors do
not have; in evaluation it packs a padded batch into a nested tensor, and its layers call one kernel
instead of their modules. Shapes, and what is computed, are the same without.

`multi_head_attention_forward` is one function to a mode, which does not see the call of attention
inside; a copy of it calls what it is given.

One of the modules that hold what nbdist uses of torch's private parts; see `torch_groups.py`. Tried
with torch 2.13.0 (CPU).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import transformer

from nbdist.engine.compat.lacking import lacking

_transformer: Any = transformer
_MULTI_HEAD: Any = functional.multi_head_attention_forward
_CALLED = {"has_torch_function", "scaled_dot_product_attention"}


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    missing = lacking(transformer, ["_detect_is_causal_mask"], "nn.Transformer's module")
    if "use_nested_tensor" not in transformer.TransformerEncoder.__init__.__code__.co_names:
        missing.append("TransformerEncoder.use_nested_tensor is gone")
    absent = sorted(_CALLED.difference(_MULTI_HEAD.__code__.co_names))
    missing += [f"multi_head_attention_forward does not call {name}" for name in absent]
    return [f"torch {torch.__version__}: {what}" for what in missing]


def multi_head(attend: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return `multi_head_attention_forward` with `attend` for `scaled_dot_product_attention`."""
    names = {
        **vars(functional),
        "scaled_dot_product_attention": attend,
        "has_torch_function": lambda _tensors: False,  # else it would ask the mode again
    }
    return FunctionType(_MULTI_HEAD.__code__, names, argdefs=_MULTI_HEAD.__defaults__)


@contextmanager
def by_modules() -> Iterator[None]:
    """Have no kernel that skips modules, and no nested tensors."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def keep_padding(model: nn.Module) -> None:
    """Have no padded batch packed into a nested tensor, which cannot be a DTensor; for good."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


@contextmanager
def without_numbers() -> Iterator[None]:
    """Have no decision by the numbers of a mask: it is causal only where the caller says so."""
    native = _transformer._detect_is_causal_mask

    def as_told(_mask: object, is_causal: bool | None = None, _size: int | None = None) -> bool:
        return is_causal is True

    _transformer._detect_is_causal_mask = as_told
    try:
        with by_modules():
            yield
    finally:
        _transformer._detect_is_causal_mask = native
