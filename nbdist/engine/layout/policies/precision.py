"""Mixed precision: the dtypes in which a model computes, and its gradients are averaged.

Under fsdp the units themselves are gathered in the low precision (torch's MixedPrecisionPolicy);
elsewhere autocast chooses operator by operator. Parameters and optimizer states stay as they are.

Source: Micikevicius et al., "Mixed Precision Training", 2018.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree

from nbdist.engine.compat import torch_modules
from nbdist.engine.layout.plan.wrap_forward import Around
from nbdist.engine.layout.policies.efficiency import Precision
from nbdist.shared.errors import LayoutError

# Products of eight bits (`eight_bits`) lie within a model that computes in bfloat16.
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.bfloat16,
    "mxfp8": torch.bfloat16,
}


def check(model: nn.Module, policy: Precision) -> None:
    """Refuse layouts that cannot use a loss scale.

    Raises:
        LayoutError: Parameters are trained in fp16.
    """
    if not policy.needs_scaler:
        return
    name = next((n for n, p in model.named_parameters() if _is_half(p)), None)
    if name is not None:
        raise LayoutError(
            f'Precision("fp16") is given, and parameter {name} is float16 itself.',
            why="an optimizer's steps are smaller than float16's, so it needs float32 to add to",
            do="build the model in float32; it computes in fp16 by the policy",
        )


def _is_half(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.dtype == torch.float16


def for_units(policy: Precision) -> MixedPrecisionPolicy:
    """Return the dtypes in which a unit of fsdp is gathered, computes and averages.

    Only the root's outputs are made float32 (`for_root`): a block's go into the next block, whose
    parameters are of the low precision too.
    """
    if policy.compute == "fp32":
        return MixedPrecisionPolicy(reduce_dtype=reduce_dtype(policy))
    return MixedPrecisionPolicy(DTYPES[policy.compute], DTYPES[policy.reduce])


def for_root(policy: Precision) -> MixedPrecisionPolicy:
    """Return the same for the root."""
    units = for_units(policy)
    output = None if policy.compute == "fp32" else torch.float32
    return MixedPrecisionPolicy(units.param_dtype, units.reduce_dtype, output)


def reduce_dtype(policy: Precision) -> torch.dtype | None:
    """Return the dtype in which gradients are averaged; None for their own."""
    return None if policy.reduce == "fp32" else DTYPES[policy.reduce]


class Autocast(Around):
    """A model's forward under autocast; what it returns is float32."""

    def __init__(self, model: nn.Module, policy: Precision, device_type: str) -> None:
        super().__init__(model)
        self._dtype = DTYPES[policy.compute]
        self._device_type = device_type

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run the model."""
        with torch.autocast(self._device_type, self._dtype):
            out = self.inner(*args, **keywords)
        return _pytree.tree_map(self._whole, out)

    def _whole(self, value: Any) -> Any:
        is_low = isinstance(value, torch.Tensor) and value.dtype == self._dtype
        return value.float() if is_low else value


class FullStatistics(Around):
    """A batch norm of a unit in low precision: it computes with float32, as its statistics are."""

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run the norm."""
        places = self._module._parameters
        low = {name: p for name, p in places.items() if p is not None}
        try:
            for name, parameter in low.items():
                places[name] = parameter.float()  # type: ignore[assignment]
            return self.inner(*args, **keywords)
        finally:
            places.update(low)


def keep_statistics(model: nn.Module, policy: Precision) -> None:
    """Let batch norms in a model of fsdp's units compute with float32 parameters, in place."""
    if policy.compute != "fp32":
        for module in model.modules():
            if isinstance(module, _NormBase):
                FullStatistics(module)


@dataclass(frozen=True, slots=True)
class Imitation:
    """The layout's precision, for a run of the plain model that shows dtypes, on fake tensors.

    Attributes:
        low: In what it computes; None: as it was built.
        has_units: Whether units of fsdp are of it; else autocast chooses operator by operator.
    """

    low: torch.dtype | None = None
    has_units: bool = False

    @classmethod
    def of(cls, policy: Precision, *, has_units: bool) -> "Imitation":
        """Return it for a policy."""
        return cls(None if policy.compute == "fp32" else DTYPES[policy.compute], has_units)

    def state(
        self, model: nn.Module, state: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Return the parameters and buffers of `model`, by name, as a forward finds them."""
        if not self.has_units:
            return state
        norms = [(path, m) for path, m in model.named_modules() if isinstance(m, _NormBase)]
        whole = {f"{path}.{name}" for path, norm in norms for name in norm._parameters}
        low = {name for name, _ in model.named_parameters()} - whole
        return {name: self._lowered(t) if name in low else t for name, t in state.items()}

    @contextmanager
    def on(self, units: Iterable[nn.Module], device_type: str) -> Iterator[None]:
        """Compute so, while it is on.

        Args:
            units: Of fsdp, with the root: their inputs are cast to low precision, like their
                weights.
            device_type: Where.
        """
        if self.low is None:
            yield
        elif not self.has_units:
            with torch.autocast(device_type, self.low, cache_enabled=False):
                yield
        else:
            hooks = [u.register_forward_pre_hook(self._before, with_kwargs=True) for u in units]
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()

    def _before(self, _unit: nn.Module, args: Any, keywords: Any) -> Any:
        return _pytree.tree_map_only(torch.Tensor, self._lowered, (args, keywords))

    def _lowered(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.low) if tensor.is_floating_point() else tensor


AS_BUILT = Imitation()


class Scaler(torch.amp.GradScaler):
    """A GradScaler by which all ranks skip a step, or none.

    Ranks see different gradients where a model is cut: some find an overflow that others do not.
    torch itself asks only along those axes of the mesh over which an optimizer's first gradient is
    cut (2.13: `found_inf_reduce_handler`).
    """

    def __init__(self, device: str, *, enabled: bool, agrees: bool, scale: float = 2.0**16) -> None:
        super().__init__(device, init_scale=scale, enabled=enabled)
        self._agrees = agrees

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, and look for overflows on all ranks."""
        super().unscale_(optimizer)
        if self._agrees and self.is_enabled():
            for found in torch_modules.overflows_of(self, optimizer):
                dist.all_reduce(found, dist.ReduceOp.MAX)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer, unless a rank has found an overflow."""
        if self.is_enabled() and not torch_modules.is_unscaled(self, optimizer):
            # By ourselves: torch leaves the check to fused optimizers.
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)
