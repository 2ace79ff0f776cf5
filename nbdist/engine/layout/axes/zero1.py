"""`"zero1"`: replicas of the model share the optimizer's states (torch's ZeroRedundancyOptimizer).

Each rank has the states of a part of the parameters, changes that part in a step and broadcasts it
(Rajbhandari et al., "ZeRO", 2020, section 5.1). An optimizer of torch would hold all states on
every rank and train correctly, so the lack of a saving would not show: it is refused.
"""

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nbdist.shared.errors import LayoutError


def make(
    kind: type[Optimizer], params: Iterable[Any], group: dist.ProcessGroup, **options: Any
) -> Optimizer:
    """Return an optimizer of class `kind` whose states are cut over `group`.

    Raises:
        LayoutError: It would train a quantized parameter.
    """
    params = list(params)
    tensors = [t for p in params for t in (p["params"] if isinstance(p, dict) else [p])]
    if any(isinstance(t, torch.Tensor) and is_quantized(t) for t in tensors):
        raise LayoutError(
            "zero1 cannot train quantized parameters.",
            why="after a step each rank sends the others what it has updated, as plain numbers",
            do='use "zero2", which cuts them, or "ddp"',
        )
    # Here, for it brings in RPC and the compiler of scripts.
    from nbdist.engine.compat.torch_zero import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(params, kind, process_group=group, **options)


def is_quantized(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is of whole numbers, or of a library's own class (torchao's)."""
    is_plain = parameter.is_floating_point() or parameter.is_complex()
    return not is_plain or is_traceable_wrapper_subclass(parameter)


class SharedStates:
    """The models of one process whose optimizers' states are shared, and the optimizers known."""

    def __init__(self) -> None:
        self._models: WeakSet[nn.Module] = WeakSet()
        self._sharing: WeakSet[Any] = WeakSet()  # ZeroRedundancyOptimizers
        self._checked: WeakSet[Optimizer] = WeakSet()
        self._is_used = False  # checking whether a weak set is empty takes a microsecond

    def watch(self, model: nn.Module) -> None:
        """Have every optimizer refused, at its first step, that keeps all states of `model`."""
        self._is_used = True
        self._models.add(model)

    def before_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        """Refuse a plain optimizer; one inside a ZeroRedundancyOptimizer has a part, and may step.

        Raises:
            LayoutError: It holds parameters of a model whose states are to be shared.
        """
        if not self._is_used or optimizer in self._checked:
            return
        # Any ZeroRedundancyOptimizer; it steps before the one inside it.
        if hasattr(optimizer, "consolidate_state_dict"):
            self._sharing.add(optimizer)
        elif not any(one.optim is optimizer for one in self._sharing):
            self._refuse(optimizer)
        self._checked.add(optimizer)

    def _refuse(self, optimizer: Optimizer) -> None:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(p) in own for model in self._models for p in model.parameters()):
            return
        name = type(optimizer).__name__
        raise LayoutError(
            f'This {name} would keep all of its states on every rank, and the layout is "zero1".',
            why="zero1 cuts an optimizer's states over the ranks, and torch's own are whole",
            do=f'opt = layout.optimizer(torch.optim.{name}, lr=...); or the layout "zero2", which '
            "works with any optimizer",
        )


def install() -> None:
    """Refuse such optimizers from now on; before `step_state` counts steps, so that none begins."""
    register_optimizer_step_pre_hook(here.before_step)


here = SharedStates()
