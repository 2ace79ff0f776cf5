"""Attention of a whole sequence, where each rank of cp has a part: two ways to the same numbers.

    ulysses  each rank gets the whole sequence of some heads, and gives its result back by parts
    gather   each rank gets all keys and values, and works on its own rows of the result

Calls of `scaled_dot_product_attention` are intercepted by a mode while a block runs, so no
model is changed for it.

Sources: Jacobs et al., "DeepSpeed Ulysses", 2023; Dubey et al., "The Llama 3 Herd of Models", 2024,
section 3.3.2, on gathering keys and values.
"""

# B batch, H heads, t tokens of this rank, T of the whole sequence

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from nbdist.engine.compat.libraries.transformers_attention import lacks_sdpa
from nbdist.engine.layout.axes.cp import exchange
from nbdist.engine.layout.axes.cp.multi_head import MULTI_HEAD, multi_head
from nbdist.engine.layout.policies.policies import ContextParallel
from nbdist.shared.errors import LayoutError

CALL: Callable[..., Tensor] = F.scaled_dot_product_attention


class WholeSequence(TorchFunctionMode):
    """While it is on, attention sees the whole sequence. One a block and forward."""

    def __init__(
        self, mesh: DeviceMesh, policy: ContextParallel, length: int, others: Collection[int]
    ) -> None:
        """Work on `length` tokens of this rank, and keys of other sequences, over the axis `cp`."""
        super().__init__()
        self._mesh = mesh
        self._attend = _ulysses if policy.method == "ulysses" else _gather
        self._length = length
        self._keys = {length, *others}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace calls of attention, and no others."""
        if func is CALL:
            return self._call(*args, **(kwargs or {}))
        if func is MULTI_HEAD:
            return multi_head(self._call, self._whole, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> Tensor:
        check_lengths(query, key, self._length, self._keys, is_causal=is_causal)
        if attn_mask is not None:
            attn_mask = self._whole(attn_mask, query.shape[-2], key.shape[-2])
        result: Tensor = self._attend(
            (query, key, value), attn_mask, is_causal, self._mesh, dropout_p=dropout_p, **others
        )
        return result

    def _whole(self, mask: Tensor, queries: int, keys: int) -> Tensor:
        return _whole_mask(mask, queries, keys, self._mesh)


def none_found(model: nn.Module) -> LayoutError:
    """Return the error that no block attends by the function that cp takes the place of.

    What a model of transformers can do about it, it tells: one that caps scores would compute
    something else as "sdpa", which leaves the cap out.
    """
    config = getattr(model, "config", None)
    why = (
        "cp takes the place of that call; it does not see into flex_attention or a softmax of your "
        "own"
    )
    do = "write attention with torch.nn.functional.scaled_dot_product_attention"
    if cap := getattr(config, "attn_logit_softcapping", None):
        why = f"it caps scores at {cap:g}, which that function cannot"
        do = 'use "zero3" with ActivationCheckpoint() for long sequences: as "sdpa" it has no cap'
    elif config is not None and not getattr(config, "num_attention_heads", None):
        why = "it tells no heads of attention; cp cuts what attends, and no state that goes on"
        do = 'use "zero3" with ActivationCheckpoint() for long sequences'
    elif lacks_sdpa(model):
        why = "transformers has no such attention for this model"
        do = 'use "zero3" with ActivationCheckpoint() for long sequences'
    elif config is not None:
        do += '; a model of transformers does with attn_implementation="sdpa"'
    return LayoutError(
        f"No block of {type(model).__name__} calls scaled_dot_product_attention.", why=why, do=do
    )


def check_lengths(
    query: Tensor, key: Tensor, length: int, keys: Collection[int], *, is_causal: bool
) -> None:
    """Refuse attention that is neither of a sequence to itself nor to an encoder's.

    Raises:
        LayoutError: With the lengths.
    """
    tokens = key.shape[-2]
    is_known = query.dim() > 2 and query.shape[-2] == length and tokens in keys
    if not is_known or (is_causal and tokens != length):
        raise LayoutError(
            f"cp met attention with queries {tuple(query.shape)} and keys {tuple(key.shape)}, and "
            f"here a sequence has {length} tokens.",
            why="cp knows attention of a sequence to itself and to one that blocks before have "
            "made: not in windows, or to a cache of keys",
            do="give ContextParallel(example=batch) a batch as you train with; generate on a copy "
            "without cp; for other attention leave cp out",
        )


def check_heads(query: Tensor, cp: int) -> None:
    """Refuse heads that ranks cannot share equally.

    Raises:
        LayoutError: With the number, and what works.
    """
    heads = query.shape[-3]
    if heads % cp:
        raise LayoutError(
            f"Attention has {heads} heads on a rank, which cp={cp} does not divide.",
            why='"ulysses" gives every rank as many heads',
            do='use ContextParallel(method="gather"), which works with any number of heads',
        )


def repeats(key: Tensor, cp: int) -> int:
    """Return how often "ulysses" sends each head of keys, so that ranks get as many."""
    return cp // math.gcd(key.shape[-3], cp)


def _ulysses(
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    is_causal: bool,
    mesh: DeviceMesh,
    **others: Any,
) -> Tensor:
    query, *keys_and_values = qkv
    check_heads(query, mesh.size())
    heads, times = query.shape[-3], repeats(keys_and_values[0], mesh.size())
    if mask is not None and mask.dim() > 2 and mask.shape[-3] == heads:
        mask = exchange.own_part(mask, -3, mesh)
    # Of fewer heads than ranks each goes to all ranks whose queries see it.
    repeated = [one.repeat_interleave(times, -3) if times > 1 else one for one in keys_and_values]
    query, key, value = exchange.heads_for_parts([query, *repeated], mesh)
    result = CALL(query, key, value, attn_mask=mask, is_causal=is_causal, **others)
    return exchange.parts_for_heads(result, mesh)


def _gather(
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    is_causal: bool,
    mesh: DeviceMesh,
    **others: Any,
) -> Tensor:
    query, part_of_key, part_of_value = qkv
    key, value = exchange.collect([part_of_key, part_of_value], mesh)
    first = mesh.get_local_rank() * query.shape[-2]
    if mask is not None and mask.shape[-2] > 1:
        mask = exchange.own_part(mask, -2, mesh)
    return attend_rows(query, key, value, mask, is_causal, first, **others)


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    first: int,
    **others: Any,
) -> Tensor:
    """Return some rows of attention.

    Args:
        query: Of these rows.
        key: Of the whole sequence.
        value: Of the whole sequence.
        mask: Of these rows and all keys.
        is_causal: Whether a row sees no later key.
        first: Which row of the sequence is the first of them.
        others: For torch.
    """
    if is_causal:
        length = query.shape[-2]
        # No row of this rank looks beyond its last one.
        key, value = (whole[..., : first + length, :] for whole in (key, value))
        if first == 0:
            return CALL(query, key, value, is_causal=True, **others)
        if query.is_cuda and others.pop("enable_gqa", False):
            groups = query.shape[-3] // key.shape[-3]
            key, value = (whole.repeat_interleave(groups, -3) for whole in (key, value))
        mask = _causal_rows(length, first, query)
    return CALL(query, key, value, attn_mask=mask, **others)


def _causal_rows(length: int, first: int, query: Tensor) -> Tensor:
    """Return the mask of `length` rows, of which the first sees `first` keys beside its own.

    On a GPU torch's own form of it, which its fast kernels know and which takes no memory.
    """
    if query.is_cuda:
        bias: Tensor = causal_lower_right(length, first + length)
        return bias
    every = torch.ones(length, first + length, dtype=torch.bool, device=query.device)
    return every.tril(first)


def _whole_mask(mask: Tensor, queries: int, keys: int, mesh: DeviceMesh) -> Tensor:
    """Return a mask of all rows and keys: one that came with the sequence has been cut with it.

    Raises:
        LayoutError: It was made of the part's rows and keys, so most of it is missing.
    """
    if mask.dim() > 1 and mask.shape[-2:] == (queries, keys):
        raise LayoutError(
            f"A block makes a mask of {queries} x {keys} for its part of the sequence.",
            why=f"attention is over {keys * mesh.size()} tokens",
            do="make masks of the whole sequence before the first block and pass them on, or use "
            "is_causal=True",
        )
    if mask.dim() == 1:
        mask = mask.unsqueeze(0)
    for dim, length in ((-1, keys), (-2, queries)):
        if mask.shape[dim] == length:
            (joined,) = exchange.collect([mask.movedim(dim, -2)], mesh)
            mask = joined.movedim(-2, dim)
    return mask
