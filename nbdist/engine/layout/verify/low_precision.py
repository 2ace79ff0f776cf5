"""One process in the layout's precision: autocast, fsdp's casts and rounding without ranks.

So that what is left to compare is what the layout does, and not what low precision does.
"""

# n parts of the batch, g_i the gradient of part i: their mean is the sum of all g_i / n

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from nbdist.engine.layout.plan.wrap_forward import Around
from nbdist.engine.layout.policies import eight_bits, precision
from nbdist.engine.layout.policies.efficiency import Precision


class Lowered:
    """A plain model that computes in low precision from now on.

    Attributes:
        scale: Of the loss, so that small gradients do not vanish; 1 where it needs none.
        epsilon: The relative error of its numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Precision,
        units: Sequence[str] | None,
        layers: Sequence[str],
        device_type: str,
    ) -> None:
        """Change the forwards of `model`, in place.

        Args:
            model: With weights in full precision, which it keeps.
            policy: In what it computes, and in what gradients are averaged.
            units: Names of the blocks that fsdp gathers in low precision, beside the root; None
                where autocast chooses.
            layers: Names of those whose products are of eight bits.
            device_type: Its device type.
        """
        self.scale = 1.0
        self.epsilon = epsilon_of(policy)
        self._model = model
        self._weights: torch.dtype | None = None
        self._sent = precision.reduce_dtype(policy)
        self._sums: dict[str, torch.Tensor] = {}
        if policy.compute == "fp32":
            return
        eight_bits.apply(model, layers, policy, device_type)
        if units is None:
            precision.Autocast(model, policy, device_type)
            return
        self._weights = precision.DTYPES[policy.compute]
        precision.keep_statistics(model, policy)
        for name in units:
            _Unit(model.get_submodule(name), self._weights, None)
        _Unit(model, self._weights, torch.float32)

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Have the weights in low precision, as fsdp gathers them; gradients flow to the full ones.

        Around forward and backward, for a checkpoint computes again.
        """
        kept: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        made: dict[int, torch.Tensor] = {}
        for module in self._model.modules() if self._weights is not None else ():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    low = made.setdefault(id(parameter), parameter.to(self._weights))
                    kept.append((module._parameters, name, parameter))
                    module._parameters[name] = low  # type: ignore[assignment]
        try:
            yield
        finally:
            for places, name, parameter in kept:
                places[name] = parameter

    def take(self, parts: int) -> None:
        """Add a part's gradients to the mean, each rounded as it is sent; clears them."""
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                share = (parameter.grad / parts).to(self._sent or parameter.dtype)
                before = self._sums.get(name)
                self._sums[name] = share if before is None else before + share
                parameter.grad = None

    def put(self) -> None:
        """Give the parameters their mean gradients, without the loss scale."""
        for name, parameter in self._model.named_parameters():
            if name in self._sums:
                parameter.grad = self._sums[name].to(parameter.dtype) / self.scale
        self._sums.clear()


class _Unit(Around):
    """A unit of fsdp in low precision: it casts what it is called with."""

    def __init__(self, module: nn.Module, inputs: torch.dtype, outputs: torch.dtype | None) -> None:
        super().__init__(module)
        self._inputs = inputs
        self._outputs = outputs

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run the unit."""
        args, keywords = _cast((args, keywords), self._inputs)
        out = self.inner(*args, **keywords)
        return out if self._outputs is None else _cast(out, self._outputs)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values
    )


def epsilon_of(policy: Precision) -> float:
    """Return the relative error of what a policy computes and sends; 0 where it lowers nothing.

    Of products of eight bits that of bfloat16, in which their sums are: what they themselves err by
    is in the distance to float64.
    """
    low = {policy.compute, policy.reduce} - {"fp32"}
    return max((float(torch.finfo(precision.DTYPES[word]).eps) for word in low), default=0.0)
