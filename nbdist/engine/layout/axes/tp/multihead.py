"""torch's own attention, `nn.MultiheadAttention`, on the heads that a rank has.

Its function counts with the whole width, of which a rank has a part. So what its module computes is
computed here with a rank's part of the weights: projections that are cut by heads, attention, and
the output's projection, whose results the ranks add up. Forwards in evaluation come here as well:
torch takes no kernel of its own for weights that are DTensors.
"""

# B batch, T and S sequences, H heads of a rank, E the width of all heads, D of one

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbdist.engine.layout.axes.tp.cuts import ATTENTION, Cut, TensorPlan
from nbdist.engine.layout.axes.tp.sections import Sections, one

Projected = tuple[Tensor, Tensor, Tensor]


def cut_of(name: str, module: nn.Module, parts: int) -> Cut | None:
    """Return the cut of an attention by heads; None of others, or where ranks cannot share them."""
    if type(module) is not nn.MultiheadAttention or module.num_heads % parts:
        return None
    width = module.embed_dim
    packed = Sections(0, (width, width, width))
    dims = {
        **dict.fromkeys(("in_proj_weight", "in_proj_bias"), packed),
        **dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), one(0, width)),
        **dict.fromkeys(("bias_k", "bias_v"), one(2, width)),
        "out_proj.weight": one(1, width),
    }
    held = {key for key, _ in module.named_parameters()}
    if not held <= dims.keys() | {"out_proj.bias"}:
        return None  # an adapter, say, is in the place of its output's projection
    own = {key: cut for key, cut in dims.items() if key in held}
    return Cut(name, ATTENTION, "each rank has some of its heads", own)


@contextmanager
def on_parts(model: nn.Module, plan: TensorPlan, part: int = 0) -> Iterator[None]:
    """Have a plan's attentions compute with the weights of one rank.

    Args:
        model: Whose attentions are called with a rank's parts.
        plan: Of which those of style `ATTENTION` are.
        part: The rank's place on the axis `tp`.
    """
    cut = [model.get_submodule(cut.module) for cut in plan.cuts if cut.style == ATTENTION]
    before = [vars(module).get("forward") for module in cut]
    for module in cut:
        module.forward = local_forward(module, part)
    try:
        yield
    finally:
        for module, forward in zip(cut, before, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


def local_forward(module: Any, part: int) -> Callable[..., Any]:
    """Return a forward of `nn.MultiheadAttention` with a rank's weights; see `_forward`."""
    return functools.wraps(module.forward)(functools.partial(_forward, module, part))


def _forward(
    module: Any,
    part: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return this rank's addends of the output, and of the weights: zeros for others' heads.

    Raises:
        RuntimeError: As torch's, of a hint without its mask.
    """
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    q, k, v = _projected(module, query, key, value)
    mask = _merged(attn_mask, key_padding_mask, module.num_heads, q, part)
    if mask is not None:
        mask = F.pad(mask, (0, k.shape[2] - mask.shape[3]))  # what a module adds to its keys
    dropout = module.dropout if module.training else 0.0
    shares = None
    if need_weights:
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
        weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
        mixed, shares = weights @ v, _shares(weights, module.num_heads, part, average_attn_weights)
    else:
        is_hint = is_causal and key_padding_mask is None  # then the mask is not read, as in torch's
        given = None if is_hint else mask
        mixed = F.scaled_dot_product_attention(q, k, v, given, dropout, is_causal=is_hint)
    made = F.linear(mixed.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)
    if query.dim() == 2:
        return made[0], None if shares is None else shares[0]
    return made if module.batch_first else made.transpose(0, 1), shares


def _shares(weights: Tensor, heads: int, part: int, is_mean: bool) -> Tensor:
    """Return what a rank adds to the mean of all heads' weights, or to those of each head."""
    if is_mean:
        return weights.sum(1) / heads
    own = weights.shape[1]
    return F.pad(weights, (0, 0, 0, 0, part * own, heads - (part + 1) * own))


def _projected(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Projected:
    """Return queries, keys and values of a rank's heads, as (B, H, T or S, D)."""
    weight, bias = module.in_proj_weight, module.in_proj_bias
    given = [_batch_first(module, x) for x in (query, key, value)]
    if weight is not None and query is key is value:
        q, k, v = F.linear(given[0], weight, bias).chunk(3, -1)
    else:
        own = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        weights = own if weight is None else weight.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        q, k, v = map(F.linear, given, weights, biases)
    if module.bias_k is not None:
        k = torch.cat([k, module.bias_k.expand(len(k), -1, -1)], 1)
        v = torch.cat([v, module.bias_v.expand(len(v), -1, -1)], 1)
    if module.add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    q, k, v = (x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for x in (q, k, v))
    return q, k, v


def _batch_first(module: Any, x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x[None]
    return x if module.batch_first else x.transpose(0, 1)


def _merged(
    attention: Tensor | None, padding: Tensor | None, heads: int, q: Tensor, part: int
) -> Tensor | None:
    """Return what is added to scores, of masks over places, and of keys that are padding.

    Args:
        attention: (T, S), or (B and all heads, T, S), of which the rank's are taken.
        padding: (B, S), or (S).
        heads: Of all ranks.
        q: (B, H, T, D).
        part: The rank's place on the axis.
    """
    if attention is not None and attention.dim() == 3:
        attention = attention.reshape(len(q), heads, *attention.shape[1:])
        attention = attention.narrow(1, part * q.shape[1], q.shape[1])
    elif attention is not None:
        attention = attention[None, None]
    if padding is not None:
        padding = padding.reshape(len(q), 1, 1, -1)
    addends = [_as_addend(mask, q.dtype) for mask in (attention, padding) if mask is not None]
    return sum(addends[1:], addends[0]) if addends else None


def _as_addend(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
