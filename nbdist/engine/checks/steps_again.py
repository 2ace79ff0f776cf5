"""Make kept steps again, from a start on, so that a model has the weights that a later one had.

Forward, the loss of `layout.step`, backward, clipping and the optimizer's step: what of a step is
known. That it is all, is proven by the losses, and by the norms of gradients as the optimizer got
them: where they are no longer the same bit for bit, it is said from which step on, and what was the
first to differ. Main thread, all ranks.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nbdist.engine.compat import torch_anomaly
from nbdist.engine.layout.axes import whole_matrices
from nbdist.engine.layout.verify.restore import unharmed
from nbdist.engine.layout.weights import full_tensors
from nbdist.engine.steps import optimizer_states
from nbdist.engine.steps.forwards import Forward, in_modes
from nbdist.engine.steps.guard import norms_of
from nbdist.engine.steps.kept_step import KeptStep, Weights
from nbdist.engine.steps.optimizer_options import put_options
from nbdist.engine.steps.sound_steps import Norms


def runs_to(kept: KeptStep, steps: Sequence[KeptStep]) -> dict[int, tuple[int, ...]]:
    """Return from which steps on steps can be made again up to one.

    Args:
        kept: That one.
        steps: All that this rank has kept, of its cell.

    Returns:
        By number, of each step from there to this one how many forwards it has.
    """
    found: dict[int, tuple[int, ...]] = {}
    counts: tuple[int, ...] = ()
    for one in reversed(_before(kept, steps)):
        if why_not(one):
            break
        counts = (len(one.forwards), *counts)
        if one.sound is not None and one.sound.states is not None and one.weights is not None:
            found[one.step] = counts
    return found


def why_no_run(kept: KeptStep, steps: Sequence[KeptStep]) -> str:
    """Return why no step can be made again up to this one; "" where nothing is known against it."""
    for one in reversed(_before(kept, steps)):
        if why := why_not(one):
            return why if one is kept else f"of step {one.step}, {why}"
        if one.sound is not None and one.sound.states is not None:
            return ""
    return "the weights of no step before it are kept"


def chain(kept: KeptStep, steps: Sequence[KeptStep], begins: int) -> list[KeptStep]:
    """Return the steps from one on up to another."""
    return [one for one in _before(kept, steps) if one.step >= begins]


def _before(kept: KeptStep, steps: Sequence[KeptStep]) -> list[KeptStep]:
    """Return the sound steps up to one, without a gap; what was left out has changed nothing."""
    found: list[KeptStep] = []
    for one in reversed(steps):
        if one.sound is None or kept.sound is None or one.cell != kept.cell:
            continue
        if one.sound.number > kept.sound.number:
            continue
        if found and (before := found[-1].sound) and one.sound.number != before.number - 1:
            break
        found.append(one)
    return found[::-1]


def why_not(one: KeptStep) -> str:
    """Return why a step cannot be made again; "" where it can."""
    if one.sound is None:
        return "it was left out"
    optimizer, model = one.sound.of.optimizer(), one.model()
    if optimizer is None:
        return "its optimizer is gone, or not made yet"
    if model is None:
        return "its model is not known, or is gone"
    if one.sound.why_not or one.sound.of.why_not:
        return one.sound.why_not or one.sound.of.why_not
    losses = [f.loss for f in one.forwards if f.loss is not None and f.loss.value is not None]
    if len(losses) < len(one.forwards) or not losses:
        return "its loss is not known: only that of layout.step is, without a pipeline"
    if any(loss.layout() is None for loss in losses):
        return "its layout is gone"
    if any(loss.layout().policies.compress is not None for loss in losses):
        return "its gradients were compressed, with what steps before had not sent"
    if any(loss.layout().scaler.is_enabled() for loss in losses):
        return "a GradScaler has stepped its optimizer"
    if any(loss.is_changed for loss in losses):
        return "its targets have been changed in place since"
    if one.unkept or any(forward.is_changed for forward in one.forwards):
        return "its inputs are kept no more, or have been changed in place since"
    if torch_anomaly.act_in_backward(model.parameters()):
        return "its parameters have hooks that act on a gradient once it is there"
    states = one.sound.states
    if states is not None and not states.fit(optimizer):
        return "its optimizer has other parameters by now"
    return ""


def weights_of(steps: Sequence[KeptStep], model: nn.Module) -> tuple[Weights, dict[str, Any]]:
    """Make steps again; return the weights that the last one began with, and a proof.

    Everything is afterwards as before. Collective.

    Args:
        steps: The first is a start; each can be made again on all ranks.
        model: Theirs.

    Returns:
        Also `begins`, the first; `steps`, how many; `loss`, the first step whose loss is another,
        with what it was and is, or None; `norms`, the first whose gradients are others.
    """
    first = steps[0]
    assert first.sound is not None, "it is a start"
    assert first.weights is not None, "likewise"
    assert first.sound.states is not None, "likewise"
    optimizer = first.sound.of.optimizer()
    assert optimizer is not None, "it can be made again"
    proof: dict[str, Any] = {"begins": first.step, "steps": len(steps), "loss": None, "norms": None}
    with unharmed(model), optimizer_states.unharmed(optimizer):
        first.weights.put_into(model)
        with torch.no_grad():
            first.sound.states.put_into(optimizer)
        for one in steps:
            if one is steps[-1]:
                found = Weights.of(model)
            _make_again(one, model, optimizer, proof, steps_too=one is not steps[-1])
    return found, proof


def _make_again(
    one: KeptStep,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    proof: dict[str, Any],
    *,
    steps_too: bool,
) -> None:
    assert one.sound is not None, "else it has changed nothing"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in {id(p): p for p in [*model.parameters(), *parameters]}.values():
        parameter.grad = None
    with in_modes(model, one.modes), torch.enable_grad():
        for forward in one.forwards:
            was, now = _loss_again(forward, model)
            if proof["loss"] is None and not _is_same(was, now):
                proof["loss"] = [one.step, was, now]
    for args, keywords in one.sound.clips:
        nn.utils.clip_grad_norm_(model.parameters(), *args, **keywords)
    norms = norms_of([p.grad for p in parameters if p.grad is not None])
    if proof["norms"] is None and not Norms.of(parameters, norms).equal(one.sound.norms):
        proof["norms"] = one.step
    if steps_too:
        with torch.no_grad():
            put_options(optimizer, one.sound.options)
        whole_matrices.here.step(optimizer)
        full_tensors.settle(model)


def _loss_again(forward: Forward, model: nn.Module) -> tuple[float, float]:
    """Run a forward, its loss and backward again; return what the loss was, and is."""
    assert forward.loss is not None, "its step can be made again"
    assert forward.loss.value is not None, "it was made"
    layout = forward.loss.layout()
    layout.average(forward.loss.averages)
    try:
        output = forward.run(model)
        with forward.autocasting():
            again = forward.loss.run(output, lambda _: None)
    finally:
        layout.average(True)
    return float(forward.loss.value), float(again)


def _is_same(was: float, now: float) -> bool:
    return was == now or (math.isnan(was) and math.isnan(now))
