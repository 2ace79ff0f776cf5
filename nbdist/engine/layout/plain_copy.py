"""`copy.deepcopy` of a spread model: a plain module with its numbers, outside the layout.

Averages of weights (`torch.optim.swa_utils.AveragedModel`) begin with a copy, and torch refuses to
copy what `replicate` or `fully_shard` has changed. Where a rank holds all of a model, the copy is
made of its skeleton, which knows neither hooks nor groups; shards are refused in words.

A model's `__deepcopy__` is copied with it to a new rank, like its other attributes.
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from nbdist.engine.compat import torch_modules
from nbdist.engine.layout.axes import fsdp
from nbdist.engine.layout.plan import adapted
from nbdist.shared.errors import LayoutError

_PLAIN = (bool, int, float, str, type(None))


def provide(model: nn.Module, layout: str, skeleton: nn.Module | None, no_skeleton: str) -> None:
    """Have `copy.deepcopy` copy a spread model, where torch does not.

    Args:
        model: Replicated or sharded; others are copied by Python itself.
        layout: Its name.
        skeleton: The model before it was spread, without weights.
        no_skeleton: Why there is none.
    """
    if fsdp.is_sharded(model):
        why = 'a rank holds shards of it; under "ddp" and "zero1" it holds all, which can be copied'
        model.__dict__["__deepcopy__"] = partial(_refuse, layout, why)
    elif torch_modules.reducer_of(model) is not None:
        model.__dict__["__deepcopy__"] = (
            partial(_refuse, layout, no_skeleton)
            if skeleton is None
            else partial(_copy, model, layout, skeleton)
        )


def _refuse(layout: str, why: str, _memo: dict[int, Any] | None = None) -> None:
    raise LayoutError(
        f'A model with the layout "{layout}" cannot be copied here.',
        why=why,
        do="layout.state_dict() on all ranks, which is whole on rank 0, into a plain model",
    )


def _copy(model: nn.Module, layout: str, skeleton: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return the skeleton with present weights, buffers, modes and plain values. No collective.

    Args:
        model: The live one.
        layout: Its name.
        skeleton: Is left as it is.
        memo: Copies made so far, by the `id` of what was copied; gets those of all parts.
    """
    adapted.follow(skeleton, model)
    bare = dict(skeleton.named_parameters(remove_duplicate=False))
    held = dict(model.named_parameters(remove_duplicate=False))
    if changed := sorted(bare.keys() ^ held.keys()):
        _refuse(layout, f"{changed[0]} was added or taken away after parallelize")
    # Other references to a weight of the skeleton, as in recurrent layers, get the copy.
    filled: dict[int, Any] = {id(bare[name]): copy.deepcopy(held[name], memo) for name in bare}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, buffer in skeleton.named_buffers(remove_duplicate=False):
        if name in buffers:
            filled[id(buffer)] = copy.deepcopy(buffers[name], memo)
    made = copy.deepcopy(skeleton, filled)
    parts = dict(model.named_modules(remove_duplicate=False))
    for name, part in made.named_modules(remove_duplicate=False):
        if name in parts:
            _take_over(part, parts[name], memo)
    return made


def _take_over(made: nn.Module, live: nn.Module, memo: dict[int, Any]) -> None:
    """Update a part of the copy with changes of the live one since it was spread."""
    memo[id(live)] = made
    vars(made).update({name: v for name, v in vars(live).items() if type(v) in _PLAIN})
    for name, buffer in live.named_buffers(recurse=False, remove_duplicate=False):
        if not isinstance(made._buffers.get(name), torch.Tensor):
            is_saved = name not in live._non_persistent_buffers_set
            made.register_buffer(name, copy.deepcopy(buffer, memo), persistent=is_saved)
