"""Attention with a bias of relative positions, as T5's, which it makes of its tokens' number.

Under cp these are a part's. It is given the bias of the whole sequence instead, and passes it on to
further blocks; attention takes its rows or heads of it.
"""

# H heads, T tokens of the whole sequence

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from nbdist.engine.layout.plan.wrap_forward import Around

_ASKED = ("mask", "key_value_states", "position_bias")


def give_whole(block: nn.Module, cp: int) -> None:
    """Have a block's attention use biases of whole sequences, in place."""
    for module in block.modules():
        makes = hasattr(module, "compute_bias") and hasattr(module, "has_relative_attention_bias")
        if makes and {*_ASKED} <= inspect.signature(module.forward).parameters.keys():
            _WholeBias(module, cp)


class _WholeBias(Around):
    """The forward of such an attention: without a bias it gets (1, H, T, T)."""

    def __init__(self, module: nn.Module, cp: int) -> None:
        super().__init__(module)
        self._cp = cp

    def __call__(self, hidden_states: Tensor, *args: Any, **keywords: Any) -> Any:
        given = dict(zip(_ASKED, args, strict=False)) | keywords
        of: Any = self._module
        other = given.get("key_value_states")
        queries, keys = (
            one.shape[1] * self._cp
            for one in (hidden_states, hidden_states if other is None else other)
        )
        if given.get("position_bias") is None:
            given["position_bias"] = (
                of.compute_bias(queries, keys, device=hidden_states.device)
                if of.has_relative_attention_bias
                else hidden_states.new_zeros(1, 1, 1, 1)
            )
        if given.get("mask") is None and of.is_causal:
            every = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=hidden_states.device)
            given["mask"] = every.tril()
        return self.inner(hidden_states, **given)
