"""Refuse optimizers that look at whole matrices and go wrong on parts of them.

torch computes with DTensors as with the whole, so Muon's products and a norm in LAMB's manner are
right on shards, as far as an optimizer leaves the work to it: `norm.item()` is this rank's part of
the norm, `to_local()` a part of the matrix, and some operations raise when half of the weights have
changed. Names do not tell. So before an optimizer's first step on shards, one of its class steps on
a small matrix, whole and cut in the same way: a rank compares its part.

Main thread. An optimizer that works element by element sends nothing for it.
"""

import logging
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbdist.engine.compat import torch_hooks
from nbdist.engine.layout.like_optimizer import made_like
from nbdist.engine.layout.weights import full_tensors
from nbdist.engine.steps import step_state
from nbdist.shared.errors import LayoutError

_log = logging.getLogger("nbdist.layout")
_ROUNDING = 0.1  # of an update: Muon computes in bfloat16, where 0.03 is seen; parts alone give 0.6
_EACH = 4  # rows and columns of the small matrix for each rank


class WholeMatrices:
    """The optimizers that have been tried in one process.

    All ranks try one at the same step: the counts of its steps are equal, also where a rank has
    been started anew. So nothing else is remembered of what was tried.
    """

    def __init__(self) -> None:
        self._tried: WeakSet[Optimizer] = WeakSet()

    def before_step(self, optimizer: Optimizer, _args: object, _keywords: object) -> None:
        """Try an optimizer before its first step.

        Raises:
            LayoutError: On parts of a matrix it does not do what it does on the whole.
        """
        if torch.compiler.is_compiling():
            return
        counted = step_state.here().steps.get(optimizer)
        is_first = optimizer not in self._tried if counted is None else not counted.whole
        if not is_first:
            return
        ways = set()
        for group, parameter in _cut_matrices(optimizer):
            way = parameter.device_mesh, tuple(parameter.placements)
            if way not in ways:
                _try(optimizer, group, parameter)
                ways.add(way)
        self._tried.add(optimizer)


def _cut_matrices(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], DTensor]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            is_matrix = isinstance(parameter, DTensor) and parameter.ndim == 2
            if is_matrix and not all(one.is_replicate() for one in parameter.placements):
                yield group, parameter


def _try(optimizer: Optimizer, group: dict[str, Any], like: DTensor) -> None:
    whole, gradient = _small(like)
    try:
        expected = _stepped(optimizer, group, whole, gradient)
    except Exception:  # a constructor, or a step, that wants more than is known: it cannot be tried
        _log.info("%s could not be tried on parts", type(optimizer).__name__, exc_info=True)
        return
    parts = [full_tensors.cut_like(tensor, like) for tensor in (whole, gradient)]
    try:
        found = _stepped(optimizer, group, *parts)
    except Exception as error:
        raise _refusal(optimizer, f"torch says: {str(error).splitlines()[0]}") from error
    began, right = (_part(full_tensors.cut_like(tensor, like)) for tensor in (whole, expected))
    off = float((_part(found) - right).norm() / (right - began).norm().clamp_min(1e-30))
    if off > _ROUNDING:
        raise _refusal(
            optimizer,
            # Nothing that is this rank's alone: what all ranks say is shown once.
            "on a small matrix, cut in the same way, its update is another one than on the whole, "
            f"by far more than the {100 * _ROUNDING:.0f} % of rounding: it looks at a part of a "
            "norm or of a matrix as if that were all (norm.item(), to_local())",
        )


def _refusal(optimizer: Optimizer, why: str) -> LayoutError:
    name = type(optimizer).__name__
    return LayoutError(
        f"{name} cannot train parts of matrices, and this layout cuts them. No weight has changed.",
        why=why,
        do='the layout "ddp" keeps matrices whole, and "zero1" (with layout.optimizer) too, with '
        f"{name}'s states cut over the ranks; or an optimizer that works element by element, as "
        "AdamW, or is written for parts",
    )


def _small(like: DTensor) -> tuple[Tensor, Tensor]:
    """Return a matrix and its gradient, the same on all ranks, whose parts are of other sizes."""
    size = _EACH * like.device_mesh.size()
    numbers = torch.Generator().manual_seed(0)
    grows = torch.arange(1.0, size + 1)
    scale = grows.unsqueeze(1) * grows
    drawn = torch.randn(2, size, size, generator=numbers)
    return (drawn[0] * scale).to(like.device), (drawn[1] / scale).to(like.device)


def _part(tensor: Tensor) -> Tensor:
    return torch_hooks.local_part(tensor)


def _stepped(
    optimizer: Optimizer, group: dict[str, Any], matrix: Tensor, gradient: Tensor
) -> Tensor:
    """Return a matrix after one step of a new optimizer of the same class and options."""
    options = {name: value for name, value in group.items() if name != "params"}
    if "lr" in options:
        options["lr"] = 0.1  # a schedule may begin at 0
    trained = nn.Parameter(matrix.detach().clone())
    trained.grad = gradient
    devices = [matrix.device] if matrix.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        torch_hooks.step_without_hooks(made_like(optimizer, [{**options, "params": [trained]}]))
    return trained.detach()


def install() -> None:
    """Refuse such steps from now on; before `step_state` counts them, so that none has begun."""
    register_optimizer_step_pre_hook(WholeMatrices().before_step)
