"""Refuse gradients that came without a forward of the model before them, at an optimizer's step.

DDP prepares a backward in the forward of the module that it was given. A method or a part that is
called by itself, as `model.encode(x)`, prepares nothing, and each rank keeps gradients of its own,
in silence. (Under FSDP2 the weights are shards then, and torch refuses.) So does a second backward
with no forward between: it adds a rank's own gradients to the averaged ones.

Forwards are counted, and backwards that none has prepared. A step for which there was none of the
former since the last one, or any of the latter, has its gradients compared between ranks.
Main thread. A collective only there.
"""

from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbdist.engine.compat import torch_hooks, torch_modules
from nbdist.engine.compat.torch_anomaly import looks_on
from nbdist.engine.layout.axes.unused import named
from nbdist.shared.errors import LayoutError

_SHOWN = 3  # methods in an error


class Calls:
    """How often one model was called with gradients, by a hook of it.

    Attributes:
        count: How often.
        unprepared: How many backwards have come to a parameter of it with no forward since the one
            before.
        at_step: Both at the last step of each optimizer, by `id`.
    """

    def __init__(self) -> None:
        self.count = self.unprepared = 0
        self._is_prepared = False
        self.at_step: dict[int, tuple[int, int]] = {}

    def before_forward(self, _model: nn.Module, _args: object) -> None:
        """Count one."""
        if torch.is_grad_enabled():
            self.count += 1
            self._is_prepared = True

    @looks_on
    def after_gradient(self, _parameter: torch.Tensor) -> None:
        """Count a backward that is not prepared."""
        self.unprepared += not self._is_prepared
        self._is_prepared = False


class Uncalled:
    """The models of one process whose forwards are counted."""

    def __init__(self) -> None:
        self._models: list[tuple[ref[nn.Module], Calls]] = []

    def watch(self, model: nn.Module) -> None:
        """Have steps refused on gradients of `model` that are not averaged."""
        calls = Calls()
        living = [one for one in self._models if one[0]() is not None]
        self._models = [*living, (ref(model), calls)]
        model.register_forward_pre_hook(calls.before_forward, prepend=True)
        trained = next((p for p in model.parameters() if p.requires_grad and p.is_leaf), None)
        if trained is not None:
            trained.register_post_accumulate_grad_hook(calls.after_gradient)

    def before_step(self, optimizer: Optimizer, _args: Any, _keywords: Any) -> None:
        """Refuse a step on such gradients; other models do not matter.

        Raises:
            LayoutError: Names them; no weight has changed.
        """
        for held, calls in self._models:
            forwards, unprepared = calls.at_step.get(id(optimizer), (0, 0))
            if calls.count > forwards and calls.unprepared == unprepared:
                calls.at_step[id(optimizer)] = calls.count, calls.unprepared
                continue
            if (model := held()) is None:
                continue
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            came = {
                n: p for n, p in model.named_parameters() if id(p) in own and p.grad is not None
            }
            if came and (names := _not_averaged(model, came)):
                if calls.count > forwards:
                    raise _second_backward(names)
                raise _error(type(model).__bases__[-1], names)
            calls.at_step[id(optimizer)] = calls.count, calls.unprepared


def _not_averaged(model: nn.Module, came: dict[str, nn.Parameter]) -> list[str]:
    """Return the parameters whose gradients differ between ranks. Collective."""
    reducer = torch_modules.reducer_of(model)
    if reducer is None:
        return []
    own = {name: p.grad.double().sum().item() for name, p in came.items() if p.grad is not None}
    everyone = [own] * dist.get_world_size(reducer.process_group)
    dist.all_gather_object(everyone, own, group=reducer.process_group)
    names = dict.fromkeys(name for one in everyone for name in one)
    return [name for name in names if len({repr(one.get(name)) for one in everyone}) > 1]


def _error(kind: type[nn.Module], names: list[str]) -> LayoutError:
    methods = ", ".join(["forward", *_methods_of(kind)][:_SHOWN])
    return LayoutError(
        f"Gradients of {named(names)} are not averaged: no forward of {kind.__name__} came before "
        "their backward.",
        why="the layout prepares one backward in each forward of the model that it was given; a "
        f"method ({methods}) or a part of it, called by itself, prepares none",
        do="train through model(...): have forward call the method or the part, chosen by an "
        "argument if there are several; add losses up for one backward",
    )


def _second_backward(names: list[str]) -> LayoutError:
    return LayoutError(
        f"Gradients of {named(names)} are not averaged: a second backward came to them, and no "
        "forward of their model between.",
        why="the layout prepares one backward in each forward; a second one, through the same "
        "forward (retain_graph=True) or an earlier one, adds each rank's own gradients to the "
        "averaged ones",
        do="add the losses up for one backward, or call the model between two backwards",
    )


def _methods_of(kind: type[nn.Module]) -> list[str]:
    """Return the public methods that a model's own class, none of torch's, has beside `forward`."""
    if kind.__module__.startswith("torch."):
        return []
    return [
        name
        for name, value in vars(kind).items()
        if callable(value) and not name.startswith("_") and not hasattr(nn.Module, name)
    ]


def install() -> None:
    """Refuse such steps from now on; before `step_state` counts them, so that none has begun."""
    torch_hooks.keep_uncompiled(Calls.before_forward)
    torch_hooks.keep_uncompiled(Calls.after_gradient)
    register_optimizer_step_pre_hook(here.before_step)


here = Uncalled()
