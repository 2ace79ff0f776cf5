"""Report how many weights of low precision have not moved since an optimizer's first report.

An update is added in the weights' own dtype. Of bfloat16 one that is below 1/512 of a weight is
rounded away, at each step anew, without an error. What is compared is a sample: some elements of
the largest parameters, where the gradient is not zero.

Only torch's own optimizers are judged: others may keep weights of full precision beside these, or
round at random. Main thread.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nbdist.engine.compat import torch_hooks

_LOW = (torch.bfloat16, torch.float16)
_PARAMETERS = 2  # the largest
_EACH = 64  # elements of one


class StillWeights:
    """The sample of one optimizer's weights."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Choose parameters."""
        self._chosen: list[int] = []  # among all parameters, in the order of its groups
        self._began: list[float] = []
        if type(optimizer).__module__.startswith("torch.optim."):
            self._chosen = _largest([p for _, p in _with_groups(optimizer)])

    def report(self, optimizer: Optimizer, gradients: Sequence[Tensor | None]) -> dict[str, float]:
        """Return what has not moved, after a step with these gradients of its parameters.

        Where gradients are not known, as of a cell's first step, the sample is taken alone.

        Returns:
            `sampled`, elements with a gradient, and `still`, those of them that are bit-equal to
            the first sample; `rate`, the learning rate, and `peak`, the highest that its schedule
            is known to reach. Nothing of weights of full precision.
        """
        if not self._chosen:
            return {}
        held = _with_groups(optimizer)
        weights = _sample([held[i][1] for i in self._chosen])
        if len(self._began) != len(weights):
            self._began = weights
        found = [gradients[i] for i in self._chosen] if len(gradients) == len(held) else []
        slopes = _sample([gradient for gradient in found if gradient is not None])
        if len(slopes) != len(weights):
            return {}
        given = [place for place, slope in enumerate(slopes) if slope]
        rates = [float(held[i][0]["lr"]) for i in self._chosen]
        peaks = [float(held[i][0].get("initial_lr", 0.0)) for i in self._chosen]
        return {
            "sampled": float(len(given)),
            "still": float(sum(weights[place] == self._began[place] for place in given)),
            "rate": max(rates),
            "peak": max(rates + peaks),
        }


def _with_groups(optimizer: Optimizer) -> list[tuple[dict[str, Any], Tensor]]:
    return [(group, p) for group in optimizer.param_groups for p in group["params"]]


def _largest(parameters: Sequence[Tensor]) -> list[int]:
    def size(i: int) -> int:
        return torch_hooks.local_part(parameters[i]).numel()

    low = [i for i, p in enumerate(parameters) if p.dtype in _LOW and p.requires_grad and size(i)]
    return sorted(sorted(low, key=size, reverse=True)[:_PARAMETERS])


def _sample(tensors: Sequence[Tensor]) -> list[float]:
    parts = [torch_hooks.local_part(tensor).detach().reshape(-1) for tensor in tensors]
    few = [part[:: max(1, part.numel() // _EACH)][:_EACH] for part in parts]
    return torch.cat(few).tolist() if few else []  # a float holds each number of low precision
