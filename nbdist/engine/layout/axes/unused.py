"""Refuse gradients that DDP would not average, before an optimizer steps.

DDP's reducer sends a bucket of gradients when all of them are there. If one never comes it has
averaged nothing useful, and torch says so in the next forward: one step too late, and in terms
of an option that a layout does not have. fsdp, tp and pp continue without such a gradient; where
ranks leave out different ones, fsdp's collective is refused (`tap/purpose`).

A reducer averages the parameters that were trained when it was made. Where parameters have been
frozen or thawed since, the next forward makes another one, when ranks have exchanged what they
train. Parameters that have been added since are refused.

Main thread. No collective except there: each rank sees its own backward. Where one rank alone
leaves a parameter out, the others wait in the reducer, and are freed when this one raises.
"""

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbdist.engine.compat import torch_hooks, torch_modules, torch_quantized, torch_reducers
from nbdist.shared.errors import LayoutError

_SHOWN = 4  # names in an error


def refuse(model: nn.Module) -> None:
    """Refuse to continue with gradients of which DDP still waits for some.

    Raises:
        LayoutError: The last backward has left parameters out; the text names them.
    """
    reducer = torch_modules.reducer_of(model)
    if reducer is None or not torch_reducers.is_unfinished(reducer):
        return
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    left_out = [name for name, p in trained.items() if p.grad is None]
    # Where gradients are set to zero and not to None, one that never comes leaves zeros.
    left_out = left_out or [
        n for n, p in trained.items() if p.grad is not None and not p.grad.any()
    ]
    count = f"{len(left_out)} parameters" if len(left_out) > 1 else "A parameter"
    raise LayoutError(
        f"{count} got no gradient in this backward: {named(left_out)}."
        if left_out
        else "A parameter got no gradient in this backward.",
        why="replicas average gradients when all of them are there, so none of this step count; "
        "the weights are as before it",
        do="requires_grad_(False) on what no loss uses, before parallelize; run what only some "
        'ranks or steps use on all, and multiply by 0 what is not needed; or "zero2", which trains '
        "without such gradients where all ranks leave out the same",
    )


def refuse_untrained(model: nn.Module, loss: torch.Tensor) -> None:
    """Refuse a loss that has no gradient, with what torch's own error does not know.

    Raises:
        LayoutError: Nothing that is trained took part in it.
    """
    if loss.requires_grad:
        return
    is_any = any(p.requires_grad for p in model.parameters())
    raise LayoutError(
        "The loss of this step has no gradient, so there is nothing to train.",
        why="the forward used none of the parameters that are trained"
        if is_any
        else "no parameter of the model requires a gradient",
        do="requires_grad_(True) on what you train; of PEFT, from_pretrained(..., "
        "is_trainable=True) or set_adapter, and unmerge_adapter where adapters are merged",
    )


def named(names: list[str]) -> str:
    """Return the first of these names, and how many more there are, for an error."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def before_forward(model: nn.Module, _args: object) -> None:
    """Have this forward's backward average all trained parameters, as a hook of the model.

    Raises:
        LayoutError: The last backward has left parameters out, or the reducer's compression
            keeps state by bucket; or ranks train different parameters, on all of them.
    """
    if torch.is_grad_enabled():
        refuse(model)
        _follow_trained(model)


def _follow_trained(model: nn.Module) -> None:
    """Re-create the reducer if other parameters are trained than it was made for."""
    reducer = torch_modules.reducer_of(model)
    if reducer is None or not torch_reducers.trains_others(reducer):
        return
    changed = {id(parameter) for parameter in torch_reducers.changed(reducer)}
    if changed and torch_modules.has_comm_hooks(reducer):
        names = [name for name, p in model.named_parameters() if id(p) in changed]
        raise LayoutError(
            f"{named(names)} cannot be frozen or thawed after parallelize in this layout.",
            why="gradients are sent in fewer bytes, and what a step has not sent is kept for the "
            "parameters that were trained then",
            do="parallelize without Compress and without Precision's reduce=; or freeze before it",
        )
    _refuse_unlike(model, reducer.process_group)
    torch_reducers.remake_reducer(reducer)


def _refuse_unlike(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Refuse ranks whose reducers would average different parameters with each other. Collective.

    All come here in one forward: after a fault, `ddp_buckets` ensures it. A rank that alone has
    changed what it trains meets another collective of the others, which the tap refuses.
    """
    own = [name for name, p in model.named_parameters() if p.requires_grad]
    everyone: list[list[str]] = [own] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    first = everyone[0]
    for place, names in enumerate(everyone):
        if names != first:
            here, there = (dist.get_global_rank(group, at) for at in (0, place))
            more = [name for name in names if name not in first] or ["fewer"]
            less = [name for name in first if name not in names] or ["fewer"]
            raise LayoutError(
                f"Ranks train different parameters: {named(less)} on rank {here}, {named(more)} "
                f"on rank {there}.",
                why="replicas average gradients in their order, so these would be averaged with "
                "each other",
                do="freeze and thaw (requires_grad_) the same parameters on all ranks",
            )


class Unused:
    """The models of one process whose gradients a step checks, and the optimizers checked."""

    def __init__(self) -> None:
        self._models: WeakSet[nn.Module] = WeakSet()
        # Those whose parameters were there at parallelize, and how many they had.
        self._checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        # Checking whether a weak set is empty takes some microseconds a step.
        self._is_used = False

    def watch(self, model: nn.Module) -> None:
        """Have steps of optimizers refused while gradients of `model` are not averaged."""
        self._is_used = True
        self._models.add(model)

    def before_step(self, optimizer: Optimizer, _args: Any, _keywords: Any) -> None:
        """Refuse a step on gradients that are not averaged; other models do not matter."""
        if not self._is_used:
            return
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        for model in list(self._models):
            reducer = torch_modules.reducer_of(model)
            is_new = self._checked.get(optimizer) != count
            if reducer is None:
                if is_new:
                    _refuse_whole(model, optimizer)
                continue
            if is_new or torch_reducers.is_unfinished(reducer):
                own = {id(p) for group in optimizer.param_groups for p in group["params"]}
                trained = {name: p for name, p in model.named_parameters() if id(p) in own}
                if trained:
                    _refuse_strangers(reducer, trained)
                    refuse(model)
        self._checked[optimizer] = count


def _refuse_strangers(reducer: Any, trained: dict[str, nn.Parameter]) -> None:
    known = {id(parameter) for parameter in reducer.parameters()}
    _refuse_new([name for name, p in trained.items() if id(p) not in known])


def _refuse_whole(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse parameters that are whole in a model of which ranks have parts: they came later."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = dict(model.named_parameters())
    if any(isinstance(p, DTensor) for p in named.values()):
        whole = {n: p for n, p in named.items() if id(p) in own and not isinstance(p, DTensor)}
        _refuse_new([name for name, p in whole.items() if not torch_quantized.stays_whole(p)])


def _refuse_new(strangers: list[str]) -> None:
    if strangers:
        raise LayoutError(
            f"Gradients of {named(strangers)} are not averaged.",
            why="the model has got them after parallelize, and ranks would part",
            do="give the model its new parts or adapters, then parallelize",
        )


def install() -> None:
    """Refuse such steps from now on; before `step_state` counts them, so that none has begun."""
    torch_hooks.keep_uncompiled(before_forward)
    register_optimizer_step_pre_hook(here.before_step)


here = Unused()
