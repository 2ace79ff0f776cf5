"""Refuse gradients that FSDP2's hooks do not see, before an optimizer steps.

A unit reduces its gradients where a backward passes through its outputs. A backward that reaches
weights in another way, as that of a gradient penalty, leaves them whole and unreduced: they would
count one step later. So would those of a backward with sending disabled, if none follows that
sends them. And autograd computes with gathered parameters, so a hook on what an optimizer sees is
never called.

Main thread, but `backward_ended`, which is autograd's. No collective.
"""

from typing import Any
from weakref import WeakSet, ref

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbdist.engine.compat import torch_sharded
from nbdist.engine.layout.axes.unused import named
from nbdist.shared.errors import LayoutError


class Unseen:
    """The checks of one process: a step checks gradients after backwards that may skip some.

    Few do, except for those of accumulation. Hooks are searched once per optimizer.
    """

    def __init__(self) -> None:
        self._may_hold: dict[int, ref[Any]] = {}  # states of units, by their model
        self._checked: WeakSet[Optimizer] = WeakSet()

    def backward_ended(self, model: int, state: Any) -> None:
        """Note a backward that may leave gradients unreduced; see `torch_sharded`."""
        self._may_hold[model] = ref(state)

    def before_step(self, optimizer: Optimizer, _args: object, _keywords: object) -> None:
        """Refuse a step without gradients that wait in its parameters, or past their hooks.

        Raises:
            LayoutError: Names them; no weight has changed.
        """
        is_new = optimizer not in self._checked
        if not (is_new or self._may_hold):
            return
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if is_new:
            _refuse_hooks(torch_sharded.with_hooks(own))
            self._checked.add(optimizer)
        for model, reference in list(self._may_hold.items()):
            state = reference()
            trained = [] if state is None else torch_sharded.trained(state, own)
            if trained or state is None:
                _refuse_unreduced([name for name, is_whole in trained if is_whole])
                del self._may_hold[model]


def _refuse_unreduced(names: list[str]) -> None:
    if names:
        raise LayoutError(
            f"Gradients of {named(names)} have not been averaged, and this step would miss them.",
            why="a backward came to them through torch.autograd.grad(create_graph=True) alone, or "
            "was set to send nothing, and none followed that sends",
            do="around such a grad, model.set_reshard_after_backward(False) before it and (True) "
            "behind, and add 0 * out.sum() to the penalty, of the model's output; of several "
            "backwards have the last one send: layout.accumulate(n), to its end",
        )


def _refuse_hooks(names: list[str]) -> None:
    if names:
        raise LayoutError(
            f"Hooks on {named(names)} are never called.",
            why="they are shards, and autograd computes with what is gathered of them",
            do="p.register_post_accumulate_grad_hook(hook) in the place of p.register_hook: it is "
            "given p, whose p.grad is averaged then, and its own part",
        )


def install() -> None:
    """Refuse such steps from now on; before `step_state` counts them, so that none has begun."""
    unseen = Unseen()
    torch_sharded.after_backward(unseen.backward_ended)
    register_optimizer_step_pre_hook(unseen.before_step)
