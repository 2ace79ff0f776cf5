"""Measure how long each segment of a model takes, forward and backward, to balance stages by.

One forward and backward of the whole model, looked at where blocks are entered: forwards by hooks,
backwards by when a block's gradient comes. All ranks get rank 0's times, for all cut equally.
"""

import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from nbdist.engine.compat import torch_modules
from nbdist.engine.layout.axes.pp.stage_trace import arguments
from nbdist.engine.layout.plan.inputs import Inputs
from nbdist.engine.layout.plan.trace import untouched

_ROUNDS = 5  # of which the first warms up


def measure(model: nn.Module, blocks: tuple[str, ...], inputs: Inputs) -> list[float]:
    """Return the seconds of each segment. Collective; leaves the model as it was.

    Args:
        model: On its device, whole.
        blocks: In the order of the data.
        inputs: The model's inputs, as large as in training.
    """
    with torch.random.fork_rng(), untouched(model):
        kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
        rounds = [_once(model, blocks, inputs) for _ in range(_ROUNDS)][1:]
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
    medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
    device = next(model.parameters()).device
    agreed = torch.tensor(medians, device=device)
    torch_modules.broadcast_coalesced([agreed], 0)
    return [float(seconds) for seconds in agreed]


def _once(model: nn.Module, blocks: tuple[str, ...], inputs: Inputs) -> list[float]:
    entered: list[float] = []
    gradient_came: dict[int, float] = {}

    def enter(_block: nn.Module, args: Any, keywords: Any) -> None:
        number = len(entered)
        hidden = next(iter(arguments(args, keywords).values()), None)
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda _gradient: gradient_came.update({number: _now()}))
        entered.append(_now())

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(enter, with_kwargs=True)
        for name in blocks
    ]
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        began = _now()
        with torch.enable_grad():
            output = inputs.run(model)
        forwarded = _now()
        tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        total = torch.stack([t.float().sum() for t in tensors if t.requires_grad]).sum()
        torch.autograd.grad(total, trained, allow_unused=True)
        ended = _now()
    finally:
        for hook in hooks:
            hook.remove()
    forwards = [
        b - a for a, b in zip([began, *entered[1:]], [*entered[1:], forwarded], strict=True)
    ]
    # Backward, segment k runs from where the gradient of block k + 1's input has come.
    marks = [gradient_came.get(n, ended) for n in range(1, len(blocks))]
    backwards = [b - a for a, b in zip([*marks, forwarded], [ended, *marks], strict=True)]
    return [max(f + b, 0.0) for f, b in zip(forwards, backwards, strict=True)]


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
