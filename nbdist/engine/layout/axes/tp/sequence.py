"""Sequence parallel: between attention and mlp, each rank keeps its part of the sequence.

    block 0 takes its part ─▶ norm ─▶ (gather) attention (scatter) ─▶ + ─▶ norm ─▶ ... ─▶ gather

An all-reduce is an all-gather and a reduce-scatter, so the traffic stays the same, and the modules
between is stored and computed once. Norms see a part of the tokens: their gradients are summed.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from nbdist.engine.compat import torch_sharded
from nbdist.engine.layout.axes.tp.cuts import TensorPlan
from nbdist.shared.errors import LayoutError

_SEQUENCE = 1  # the dim of tokens: (batch, sequence, features)


def check(blocks: dict[str, nn.Module], plan: TensorPlan) -> None:
    """Refuse a model whose blocks cannot work on parts of the sequence.

    Raises:
        LayoutError: Not one list of blocks, or linears directly in the block.
    """
    lists = {name.rpartition(".")[0] for name in blocks}
    if len(lists) != 1:
        found = ", ".join(sorted(lists)) or "none"
        raise LayoutError(
            f"TensorParallel(sequence=True) needs one list of equal blocks, and found {found}.",
            do="leave sequence out",
        )
    for pair in plan.pairs:
        if pair.row in pair.columns:
            raise LayoutError(
                f"TensorParallel(sequence=True) cannot route parts of a sequence to {pair.row}.",
                why="it works on the whole sequence: an attention of torch's, or experts that are "
                "chosen beside them",
                do="leave sequence out",
            )
        if pair.owner in blocks or not _inside(pair.owner, blocks):
            raise LayoutError(
                f"TensorParallel(sequence=True) finds {', '.join(pair.columns)} in no module of "
                "their own.",
                why="the sequence is gathered where attention and mlp begin, and norms are before",
                do="make attention and mlp modules of the block, or leave sequence out",
            )
    for name, block in blocks.items():
        for path, module in block.named_modules(prefix=name):
            own = [p for p in module._parameters.values() if p is not None]
            is_within = any(_is_under(path, pair.owner) for pair in plan.pairs)
            if own and not is_within and any(p.dim() > 1 for p in own):
                raise LayoutError(
                    f"TensorParallel(sequence=True) does not know {path} "
                    f"({type(module).__name__}), between attention and mlp.",
                    why="there each rank sees a part of the sequence, which only what works token "
                    "by token may do, such as a norm",
                    do="leave sequence out",
                )


def check_gradients(plan: TensorPlan) -> None:
    """Refuse parameters in attention and mlp whose gradients each rank had whole in a proof.

    They work on what columns take, which is a DTensor with sequence parallel, or on what a row
    makes, which is a part of the sequence.

    Raises:
        LayoutError: There is one.
    """
    for owner in dict.fromkeys(pair.owner for pair in plan.pairs):
        inside = (name for name in plan.gradients if _is_under(name, owner))
        name = next((name for name in inside if not plan.gradients[name]), None)
        if name is not None:
            raise LayoutError(
                f"TensorParallel(sequence=True) does not know how {owner} uses {name}.",
                why="it is used beside the columns and their row, where the sequence is gathered "
                "and cut",
                do=f"use it in the block, before or after {owner}, or leave sequence out",
            )


def norms(blocks: dict[str, nn.Module], plan: TensorPlan) -> Iterator[nn.Module]:
    """Yield the modules with parameters that will see a part of the sequence."""
    for name, block in blocks.items():
        for path, module in block.named_modules(prefix=name):
            if not any(_is_under(path, pair.owner) for pair in plan.pairs):
                yield module


def apply(
    model: nn.Module, plan: TensorPlan, mesh: DeviceMesh, runs: list[list[nn.Module]]
) -> None:
    """Cut the sequence where blocks begin, gather it in them, put it together where they end.

    The ends wrap forwards, inside all hooks: with an axis cp, which wraps them,
    a part of its part is cut, and put together before it.

    Args:
        model: Its blocks are on this rank.
        plan: The plan of tp.
        mesh: The axis `tp`.
        runs: Blocks that follow each other here: all of them, or those of each stage.
    """
    for run in runs:
        _wrap(run[0], _InputHook(_take_part, mesh), None)
        _wrap(run[-1], None, _After(mesh))
    for owner in dict.fromkeys(pair.owner for pair in plan.pairs):
        module = model.get_submodule(owner)
        module.register_forward_pre_hook(_InputHook(_gather, mesh), with_kwargs=True)


def _wrap(module: nn.Module, before: "_InputHook | None", after: "_After | None") -> None:
    forward = module.forward

    @functools.wraps(forward)
    def on_parts(*args: Any, **keywords: Any) -> Any:
        if before is not None:
            args, keywords = before(module, args, keywords)
        made = forward(*args, **keywords)
        return made if after is None else after(module, args, made)

    module.forward = on_parts


def _take_part(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    length, parts = whole.shape[_SEQUENCE], mesh.size()
    if length % parts:
        raise LayoutError(
            f"A sequence of {length} tokens cannot be cut into {parts} equal parts.",
            why="TensorParallel(sequence=True) gives each rank of tp as many of them",
            do=f"pad it to {-(-length // parts) * parts}, or leave sequence out",
        )
    part: torch.Tensor = _changed(whole, mesh, Replicate(), Shard(_SEQUENCE)).to_local()
    return part


def _gather(part: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return the whole as a DTensor: gradients of it are sums to be, and scattered as such."""
    return _changed(part, mesh, Shard(_SEQUENCE), Replicate())


def _changed(
    tensor: torch.Tensor, mesh: DeviceMesh, is_now: Placement, to_be: Placement
) -> DTensor:
    known = DTensor.from_local(tensor, mesh, [is_now], run_check=False)
    changed: DTensor = known.redistribute(placements=[to_be])
    return changed


class _InputHook:
    """Changes the hidden states that a module is called with."""

    def __init__(
        self, change: Callable[[torch.Tensor, DeviceMesh], torch.Tensor], mesh: DeviceMesh
    ) -> None:
        self._change = change
        self._mesh = mesh

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for place, value in enumerate(args):
            if _is_hidden(value):
                return (
                    *args[:place],
                    self._change(value, self._mesh),
                    *args[place + 1 :],
                ), keywords
        for name, value in keywords.items():
            if _is_hidden(value):
                return args, {**keywords, name: self._change(value, self._mesh)}
        return args, keywords


class _After:
    """Puts the sequence together where the last block gives it away."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __call__(self, _module: nn.Module, _args: object, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._whole(output[0]), *output[1:])
        return self._whole(output)

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        return torch_sharded.as_own(_gather(part, self._mesh).to_local())


def _is_hidden(value: object) -> bool:
    """Return whether a value is the stream of hidden states: (batch, sequence, features)."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 3


def _inside(name: str, blocks: dict[str, nn.Module]) -> bool:
    return any(_is_under(name, block) for block in blocks)


def _is_under(name: str, ancestor: str) -> bool:
    return name == ancestor or name.startswith(ancestor + ".")
