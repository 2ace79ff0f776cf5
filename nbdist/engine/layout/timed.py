"""A few steps of a fresh model under a layout, timed. Collective."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.plan.inputs import as_inputs
from nbdist.study.estimate import TensorShape

_WARM = 2  # steps that are not counted: the first makes buckets and states


def seconds_a_step(
    device: torch.device,
    factory: Callable[[], nn.Module],
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None,
    layout: str,
    policies: tuple[object, ...],
    optimizer: type[torch.optim.Optimizer] | None,
    options: Mapping[str, Any],
    parts: int,
    steps: int,
) -> float:
    """Return the seconds of the usual step. The batch is all zeros; nothing is kept.

    Args:
        device: Of this rank.
        factory: Makes the model.
        batch: Shapes of one micro-batch; with `loss` a pair of inputs and targets.
        loss: As in `nbdist.estimate`.
        layout: As `parallelize` takes it; "" is a plain model on this rank alone.
        policies: Likewise.
        optimizer: Its class; AdamW without it.
        options: Its arguments.
        parts: Micro-batches of a step.
        steps: How many are timed.
    """
    zeros = tree_map_only(TensorShape, lambda one: _zeros(one, device), batch)
    x, y = zeros if loss is not None else (zeros, None)
    loss_of = loss or _loss_of_outputs
    kind = optimizer or torch.optim.AdamW
    if layout:
        spread = parallelize(factory, layout, *policies)
        made = spread.optimizer(kind, **options)

        def part(is_last: bool) -> None:
            if spread.shape.fsdp == 1:
                spread.average(is_last)
            spread.step(x, y, loss_of)
    else:
        model = factory().to(device)
        made = kind(model.parameters(), **options)

        def part(is_last: bool) -> None:
            loss_of(as_inputs(x).run(model), y).backward()

    took = []
    for _ in range(_WARM + steps):
        began = time.perf_counter()
        for number in range(parts):
            part(number == parts - 1)
        made.step()
        made.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - began)
    return median(took[_WARM:])


def _zeros(shape: TensorShape, device: torch.device) -> Tensor:
    return torch.zeros(shape.shape, dtype=getattr(torch, shape.dtype), device=device)


def _loss_of_outputs(outputs: Any, _targets: Any) -> Tensor:
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    floats = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()]
    return floats[0].float().mean()
