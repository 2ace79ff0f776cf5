"""Have optimizers that look at whole matrices step on whole ones, where a layout cuts them.

torch computes with DTensors as with the whole, as far as an optimizer leaves the work to it:
`norm.item()` is this rank's part of the norm, `to_local()` a part of the matrix, and some
operations raise when half of the weights have changed. Names do not tell. So before an optimizer's
first step on shards, ones of its class step on two small tensors, whole and cut in the same way.
Where parts become something else, and tensors that take turns (`in_turns`) become the same, it
steps so. Where neither does, it is refused.

Main thread. An optimizer that works element by element sends only these small tensors.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nbdist.engine.compat import torch_hooks
from nbdist.engine.layout.axes import in_turns
from nbdist.engine.layout.like_optimizer import made_like
from nbdist.engine.layout.weights import full_tensors
from nbdist.engine.tap import counters
from nbdist.shared.errors import LayoutError

_log = logging.getLogger("nbdist.layout")
_EXACT = 1e-4  # of an update: sums of float32 in another order
_ROUNDING = 0.1  # where turns are no way: in bfloat16 0.03 is seen, and parts alone give 0.6
_EACH = 4  # entries along a dim of the small tensors for each rank
_STEPS = 2  # the second has a state to begin with

_Step = Callable[[Optimizer], None]


class WholeMatrices:
    """The optimizers that have been tried in one process, and how they step.

    All ranks try one at the same step: at its first, and at its next when ranks were started anew,
    which make a generation of the group with the others.
    """

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Optimizer, tuple[tuple[int, int], bool]]
        self._found = WeakKeyDictionary()

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Put a stand-in in the place of an optimizer that steps on whole tensors.

        Raises:
            LayoutError: On parts of a matrix it does not do what it does on the whole.
        """
        if torch.compiler.is_compiling():
            return None
        if in_turns.is_stand_in(optimizer):
            raise _refusal(
                optimizer, "its step calls that of its base class, whose hooks would see no part"
            )
        if not self.takes_turns(optimizer):
            return None
        return (in_turns.stand_in(optimizer), *args[1:]), keywords

    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], _keywords: object) -> None:
        """Take over what a stand-in has noted."""
        if args and args[0] is not optimizer and in_turns.is_stand_in(args[0]):
            in_turns.take_over(optimizer, args[0])

    def takes_turns(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps on whole tensors; try it where that is unknown.

        Collective where it is tried.

        Raises:
            LayoutError: It is wrong on parts, and in turns.
        """
        now = counters.generation(), len(optimizer.param_groups)
        found = self._found.get(optimizer)
        if found is None or found[0] != now:
            found = self._found[optimizer] = now, _needs_turns(optimizer)
        return found[1]

    def step(self, optimizer: Optimizer) -> None:
        """Let an optimizer step as it does, without a word to those who count steps.

        Raises:
            LayoutError: It is wrong on parts, and in turns.
        """
        (_in_turns if self.takes_turns(optimizer) else torch_hooks.step_without_hooks)(optimizer)


def _in_turns(optimizer: Optimizer) -> None:
    stood_in = in_turns.stand_in(optimizer)
    torch_hooks.step_without_hooks(stood_in)
    in_turns.take_over(optimizer, stood_in)


def _needs_turns(optimizer: Optimizer) -> bool:
    ways = set()
    needs = False
    for number, group, parameter in _cut_parameters(optimizer):
        way = number, parameter.device_mesh, tuple(parameter.placements), parameter.ndim
        if way not in ways:
            ways.add(way)
            needs |= _try(optimizer, group, parameter)
    return needs


def _cut_parameters(optimizer: Optimizer) -> Iterator[tuple[int, dict[str, Any], DTensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for parameter in filter(in_turns.is_cut, group["params"]):
            yield number, group, parameter


def _try(optimizer: Optimizer, group: Mapping[str, Any], like: DTensor) -> bool:
    """Return whether an optimizer has to step on whole tensors to be right."""
    began, gradients = _small(like)

    def moved(step: _Step, seed: int, cut: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return by how much each tensor has moved, whole."""
        return _moved(optimizer, group, [*map(cut, began)], [*map(cut, gradients)], step, seed)

    def parts(whole: Tensor) -> Tensor:
        return full_tensors.cut_like(whole, like)

    try:
        right = moved(torch_hooks.step_without_hooks, 0, lambda whole: whole)
    except Exception:  # a constructor, or a step, that wants more than is known: it cannot be tried
        _log.info("%s could not be tried on parts", type(optimizer).__name__, exc_info=True)
        return False
    off, says = _off(right, lambda: moved(torch_hooks.step_without_hooks, 0, parts))
    if off <= _EXACT:
        return False
    # Where parts are offloaded, a whole one would not be where they meet. With another seed: what
    # ranks draw at random is not the same.
    if like.device.type == like.device_mesh.device_type:
        in_turns_off, _ = _off(right, lambda: moved(_in_turns, 1, parts))
        if in_turns_off <= _EXACT:
            return True
    if off <= _ROUNDING:
        return False
    raise _refusal(optimizer, says or _WRONG)


def _off(right: list[Tensor], moved: Callable[[], list[Tensor]]) -> tuple[float, str]:
    """Return how far updates are from the right ones, of which they are a share; torch's words."""
    try:
        found = moved()
    except Exception as error:
        return float("inf"), f"torch says: {(str(error).splitlines() or [''])[0]}"
    shares = ((a - b).norm() / b.norm().clamp_min(1e-30) for a, b in zip(found, right, strict=True))
    return max(float(share.nan_to_num(float("inf"))) for share in shares), ""


# Nothing that is this rank's alone: what all ranks say is shown once.
_WRONG = (
    "on small matrices, cut in the same way, its updates are others than on the whole, by far more "
    f"than the {100 * _ROUNDING:.0f} % of rounding, and also where whole ones are given to it one "
    "after the other: its steps draw random numbers, or need all matrices at once"
)


def _refusal(optimizer: Optimizer, why: str) -> LayoutError:
    name = type(optimizer).__name__
    return LayoutError(
        f"{name} cannot train parts of matrices, and this layout cuts them. No weight has changed.",
        why=why,
        do='the layout "ddp" keeps matrices whole, and "zero1" (with layout.optimizer) too, with '
        f"{name}'s states cut over the ranks; or an optimizer whose step goes once through "
        "self.param_groups, and through each group's parameters by themselves",
    )


def _small(like: DTensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return two tensors, and gradients, the same on all ranks, whose parts are of other sizes.

    One is tall and one is wide. The second is much larger, which a norm over both would show.
    """
    size = _EACH * like.device_mesh.size()
    cut = {getattr(placement, "dim", None) for placement in like.placements}
    sizes = [size if dim < 2 or dim in cut else 2 for dim in range(like.ndim)]
    numbers = torch.Generator().manual_seed(0)
    tensors, gradients = [], []
    for longer, by in ((0, 1.0), (1, 50.0)):
        shape = [size * (1 + (dim == longer)) for dim, size in enumerate(sizes)]
        scale = torch.full((), by)
        for each in shape:
            scale = scale.unsqueeze(-1) * torch.arange(1.0, each + 1)
        drawn = torch.randn(2, *shape, generator=numbers)
        tensors.append((drawn[0] * scale).to(like.device))
        gradients.append((drawn[1] * by / scale).to(like.device))
    return tensors, gradients


def _moved(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    began: list[Tensor],
    gradients: list[Tensor],
    step: _Step,
    seed: int,
) -> list[Tensor]:
    """Return by how much a new optimizer like this one moves tensors, whole."""
    options = {name: value for name, value in group.items() if name != "params"}
    if "lr" in options:
        options["lr"] = 0.1  # a schedule may begin at 0
    trained = [nn.Parameter(one.detach().clone()) for one in began]
    devices = [began[0].device] if began[0].is_cuda else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        made = made_like(optimizer, [{**options, "params": trained}])
        for number in range(_STEPS):
            for one, gradient in zip(trained, gradients, strict=True):
                one.grad = gradient * (number + 1)
            step(made)
    ends = (full_tensors.whole_of(one) for one in trained)
    return [end - full_tensors.whole_of(one) for end, one in zip(ends, began, strict=True)]


def install() -> None:
    """Let optimizers step so from now on; before `step_state` counts, so that none has begun."""
    register_optimizer_step_pre_hook(here.before_step)
    register_optimizer_step_post_hook(here.after_step)


here = WholeMatrices()
