"""`nn.MultiheadAttention` under cp: masks are of whole sequences, and weights are not made.

It projects, attends and projects in one function of torch, which a mode gets as a whole. The
attention inside of it is called with masks that are put together here, as that function would; its
own check of their sizes knows the part's tokens only.
"""

# B batch, E features, t tokens of this rank

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from nbdist.engine.compat import torch_transformer
from nbdist.shared.errors import LayoutError

MULTI_HEAD: Callable[..., tuple[Tensor, Any]] = F.multi_head_attention_forward
_SIGNATURE = inspect.signature(MULTI_HEAD)


class NotMade:
    """Stands for the weights of attention, whose use is refused."""

    def __getattr__(self, _name: str) -> NoReturn:
        raise _weights_used()

    def __getitem__(self, _key: object) -> NoReturn:
        raise _weights_used()

    @classmethod
    def __torch_function__(cls, *_called: object) -> NoReturn:
        """Refuse to be an argument of torch's functions."""
        raise _weights_used()


def multi_head(
    attend: Callable[..., Tensor],
    whole: Callable[[Tensor, int, int], Tensor],
    *args: Any,
    **keywords: Any,
) -> tuple[Tensor, Any]:
    """Call `multi_head_attention_forward` with another function for attention inside.

    Args:
        attend: As `scaled_dot_product_attention`.
        whole: Returns a mask of all rows and keys, of one for queries and keys of these numbers.
        args: For it: queries, keys and values (t, B, E), and more.
        keywords: For it.

    Raises:
        LayoutError: It adds keys of its own.
    """
    given = _SIGNATURE.bind(*args, **keywords).arguments
    _check_keys(given)
    query, weighs = given["query"], given.get("need_weights", True)
    mask, padding = given.pop("attn_mask", None), given.pop("key_padding_mask", None)
    is_causal = False
    if mask is not None:  # torch wants one, too, where a call is causal
        is_causal = given.pop("is_causal", False) and padding is None and not weighs
    if is_causal:
        mask = None
    else:
        batch = query.shape[1] if query.dim() == 3 else 1
        masks = []
        if mask is not None:
            masks.append(mask.unflatten(0, (batch, -1)) if mask.dim() == 3 else mask)
        if padding is not None:
            masks.append(padding.view(batch, 1, 1, -1))
        added = [whole(_numbers(one, query.dtype), len(query), len(given["key"])) for one in masks]
        mask = sum(added[1:], added[0]) if added else None

    def inside(q: Tensor, k: Tensor, v: Tensor, _mask: object, dropout_p: float, _: bool) -> Tensor:
        return attend(q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal)

    given["need_weights"] = False
    result, _ = torch_transformer.multi_head(inside)(**given)
    return result, NotMade() if weighs else None


def _numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as numbers to add; in one of bool True is a key that is not seen."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def _check_keys(given: dict[str, Any]) -> None:
    adds = given.get("bias_k") is not None or given.get("add_zero_attn", False)
    if adds or given.get("static_k") is not None:
        raise LayoutError(
            "cp cannot cut an nn.MultiheadAttention with keys of its own.",
            why="each part of a sequence would add one (add_bias_kv, add_zero_attn)",
            do="leave these options out; or leave cp out",
        )


def _weights_used() -> LayoutError:
    return LayoutError(
        "The weights of an nn.MultiheadAttention are used, and under cp they are not made.",
        why="a rank has some rows, or some heads, of them",
        do="use only the first of its two results; or leave cp out",
    )
