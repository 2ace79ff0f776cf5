"""A step that a rank keeps, its weights and the norms of its gradients; which steps stay.

Main thread, and the one that steps.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbdist.engine.compat.torch_hooks import local_part
from nbdist.engine.steps.forwards import Forward
from nbdist.engine.steps.sound_steps import SoundStep, newest_since_older_start
from nbdist.shared.wire import MOST_LEFT_OUT


@dataclass(slots=True)
class KeptStep:
    """A step that was left out, or of a cell that keeps all.

    Attributes:
        cell: The number of its cell, as the session counts them.
        step: Its number in the cell.
        loss: Of this rank; None where it is not known.
        gradients: The norm of this rank's gradients by module, None where it is not finite; of one
            that was left out.
        is_of_all: Whether it was made on all ranks, and not on one that trains by itself.
        model: What was trained; gives None where it is not known, or is gone.
        modes: Of its modules, whether they train, in the order of `modules()`.
        weights: Of its parameters and buffers, in their order, as it began; None where they are
            too large, or it was not left out and is no start.
        forwards: Those of the step, as they were called.
        unkept: How many more it had, beyond the bounds.
        why_not: Why none was kept, where that is another reason.
        sound: What else is kept of it, if it was not left out; else None.
        size_bytes: Of what its forwards hold.
    """

    cell: int
    step: int
    loss: float | None
    gradients: dict[str, float | None]
    is_of_all: bool
    model: Callable[[], nn.Module | None]
    modes: tuple[bool, ...] = ()
    weights: "Weights | None" = None
    forwards: list[Forward] = field(default_factory=list)
    unkept: int = 0
    why_not: str = ""
    sound: SoundStep | None = None
    size_bytes: int = 0

    def norms(self) -> dict[str, float | None]:
        """Return the norm of this rank's gradients by module, None where it is not finite."""
        optimizer = None if self.sound is None else self.sound.of.optimizer()
        if self.sound is None or optimizer is None:
            return self.gradients
        norms = dict(zip(self.sound.norms.numbers, self.sound.norms.values.tolist(), strict=True))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return _by_module(parameters, self.model(), norms)


@dataclass(frozen=True, slots=True)
class Weights:
    """Copies of what a rank holds of a model's parameters and buffers, on the CPU."""

    copies: list[torch.Tensor]
    versions: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> "Weights":
        """Return copies of those of now."""
        return cls([tensor.to("cpu", copy=True) for tensor in held_by(model)])

    def fit(self, model: nn.Module) -> bool:
        """Return whether the model still has such tensors."""
        held = held_by(model)
        return [t.shape for t in held] == [t.shape for t in self.copies]

    @torch.no_grad()
    def put_into(self, model: nn.Module) -> None:
        """Give the model these weights."""
        for held, copy in zip(held_by(model), self.copies, strict=True):
            held.copy_(copy)


def is_start(one: KeptStep) -> bool:
    """Return whether steps can be made again from this one on."""
    return one.sound is not None and one.sound.states is not None


def within_bounds(steps: list[KeptStep], most_bytes: int) -> list[KeptStep]:
    """Return the newest steps of the newest cell; older ones without what is beyond the bounds.

    Args:
        steps: Oldest first.
        most_bytes: Of the inputs of all of them.
    """
    of_cell = [one for one in steps if one.cell == steps[-1].cell]
    left_out = [one for one in of_cell if one.sound is None][-MOST_LEFT_OUT:]
    sound = [one for one in of_cell if one.sound is not None]
    sound = sound[newest_since_older_start(list(map(is_start, sound))) :]
    staying = {*map(id, left_out), *map(id, sound)}
    kept = [one for one in of_cell if id(one) in staying]
    for one in left_out:
        if one.weights is not left_out[-1].weights:
            one.weights = None
    size = 0
    for one in reversed(kept):
        size += one.size_bytes
        if size > most_bytes:
            one.unkept += len(one.forwards)
            one.forwards = []
    return kept


def held_by(model: nn.Module) -> list[torch.Tensor]:
    """Return what this rank holds of a model's parameters and then of its buffers, each once."""
    return [local_part(tensor.detach()) for tensor in [*model.parameters(), *model.buffers()]]


def plain(model: nn.Module) -> nn.Module:
    """Return the model as its user named its modules."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def norms_by_module(
    parameters: Iterable[torch.Tensor], model: nn.Module | None
) -> dict[str, float | None]:
    """Return the norm of this rank's gradients in each module; None where it is not finite.

    Modules are in the order of the model; what is none of its parameters comes under its number
    among those of the optimizer.
    """
    numbered = list(enumerate(parameters))
    norms = {number: _norm(one.grad) for number, one in numbered if one.grad is not None}
    return _by_module([one for _, one in numbered], model, norms)


def _by_module(
    parameters: Sequence[torch.Tensor], model: nn.Module | None, norms: Mapping[int, float | None]
) -> dict[str, float | None]:
    """Return `norms_by_module` of known norms, by number of the parameter."""
    named = {} if model is None else dict(plain(model).named_parameters())
    order = {id(p): name.rpartition(".")[0] for name, p in named.items()}
    place = {number: at for at, number in enumerate(order)}
    last = len(place)
    found: dict[str, float | None] = {}
    for number in sorted(norms, key=lambda number: place.get(id(parameters[number]), last)):
        module = order.get(id(parameters[number]), f"parameter {number}")
        norm, others = norms[number], found.get(module, 0.0)
        is_bad = norm is None or others is None or not math.isfinite(norm)
        found[module] = None if is_bad else math.hypot(norm, others)  # type: ignore[arg-type]
    return found


def _norm(gradient: Any) -> float | None:
    local = local_part(gradient.detach())
    values = local._values() if local.is_sparse else local
    if not bool(torch.isfinite(values).all()):
        return None
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))
