"""An optimizer around another one, for what happens beside its steps.

A real `torch.optim.Optimizer`, so that schedulers, GradScaler and hooks take it for one. Groups and
state are those of the optimizer inside, the same objects. That one's `step` runs within ours, and
so whoever counts steps counts one. Main thread.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from nbdist.engine.compat import torch_live

Closure = Callable[[], Any]


def notices() -> tuple[str, ...]:
    """Return what wrappers tell at a cell's end of ranks that they leave apart.

    A sentence, and not the end of the round: that is a collective, and a rank whose cell has failed
    would never come.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ()
    living = torch_live.here.live(Optimizer)
    return tuple(said for o in living if isinstance(o, Wrapper) and (said := o.left_open()))


class Wrapper(Optimizer):
    """Base of the wrappers.

    Attributes:
        optim: The optimizer inside. Whatever looks for optimizers leaves it to its wrapper, by this
            name, which torch's own wrappers use too.
        name: How it was asked for, such as `LocalSGD(SGD, every=8)`.
        unsaved: What checkpoints do not hold of it, in words; "" where they hold all.
    """

    name: str
    unsaved = ""

    # GradScaler then calls `step` also where gradients overflowed, and leaves it to us to leave
    # the update out: ranks that count their steps must count this one.
    _step_supports_amp_scaling = True

    def __init__(self, optim: Optimizer) -> None:
        super().__init__([dict(group) for group in optim.param_groups], optim.defaults)
        self.optim = optim
        self._share()

    def _share(self) -> None:
        """Have the groups and the state of the optimizer inside, which loading replaces."""
        self.defaults = self.optim.defaults
        self.param_groups = self.optim.param_groups
        self.state = self.optim.state

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters in the order of the groups."""
        return [p for group in self.param_groups for p in group["params"]]

    def own_state(self) -> dict[str, Any]:
        """Return what the wrapper itself remembers: plain values, and live tensors in lists."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Take over what `own_state` returned; tensors may be the live ones, already filled."""

    def restart(self) -> None:
        """Begin from the weights as they are: others have been loaded, without a state of ours."""

    def left_open(self) -> str:
        """Return a sentence if the running cell leaves the ranks of one model different."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer inside, and under "wrapper" what is ours."""
        return {**self.optim.state_dict(), "wrapper": self.own_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict`; one of the bare optimizer leaves what is ours as it is."""
        inner = {name: value for name, value in state_dict.items() if name != "wrapper"}
        self.optim.load_state_dict(inner)
        self._share()
        if "wrapper" in state_dict:
            self.load_own_state(state_dict["wrapper"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer inside."""
        if "optim" in self.__dict__:
            self.optim.add_param_group(param_group)
        else:  # torch's constructor
            super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.optim.zero_grad(set_to_none)

    def _step_inside(self, closure: Closure | None) -> Any:
        """Let the optimizer inside make its step, unless a GradScaler has found an overflow."""
        self._share()  # somebody may have loaded a state into the one inside
        if self._has_overflowed():
            return None
        return self.optim.step() if closure is None else self.optim.step(closure)

    def _has_overflowed(self) -> bool:
        """Return whether a GradScaler says so of this step; else unscale, if that is left to us."""
        overflows = getattr(self, "found_inf", None)
        if overflows is None:
            return False
        if float(overflows):
            return True
        scale = getattr(self, "grad_scale", None)
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if scale is not None and gradients:
            _divide(gradients, float(scale))
        return False


class ApartWrapper(Wrapper):
    """A wrapper under which ranks hold different models between two averagings, rightfully.

    Attributes:
        modules: The outermost ones that hold its parameters.
    """

    modules: list[nn.Module]

    def next_meeting(self, ahead: int) -> int:
        """Return in how many steps, `ahead` at least, all ranks are equal again."""
        raise NotImplementedError

    def between_meetings(self) -> int:
        """Return the most steps that a rank can be ahead of another one."""
        raise NotImplementedError


def _divide(tensors: Sequence[torch.Tensor], by: float) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(tensors), 1.0 / by)
