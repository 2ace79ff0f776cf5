"""Keep, in this rank's memory, what a step that was left out can be looked into with.

A step that `guard` leaves out has changed no weight, so its forward can run again: kept are its
inputs, the random numbers and the weights that it began with, its loss and the norms of its
gradients. Inputs are kept by reference and weights copied, both within bounds and only then; while
steps are sound, references to one step's inputs are all that is held. The steps of one cell are
kept, until another leaves one out. Nothing leaves the rank's memory, for it holds people's samples,
but where a cell asks for it (`evidence_file`).

Threads: as `guard`.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbdist.engine.compat.torch_hooks import local_part
from nbdist.engine.steps import step_state
from nbdist.engine.steps.forwards import Forward, Forwards, GivenBatch, MadeLoss, bytes_of
from nbdist.shared.wire import MOST_LEFT_OUT

Optimizer = torch.optim.Optimizer

INPUT_BYTES: Final = 256 << 20  # of the inputs of all of them
WEIGHT_BYTES: Final = 256 << 20  # of the weights of the newest, in the host's memory

_log = logging.getLogger("nbdist.guard")


@dataclass(slots=True)
class LeftOutStep:
    """A step that was left out.

    Attributes:
        cell: The number of its cell, as the session counts them.
        step: Its number in the cell.
        loss: Of this rank; None where it is not known.
        gradients: The norm of this rank's gradients by module, None where it is not finite.
        is_of_all: Whether it was left out on all ranks, and not on one that trains by itself.
        model: What was trained; gives None where it is not known, or is gone.
        modes: Of its modules, whether they train, in the order of `modules()`.
        weights: Of its parameters and buffers, in their order; None where they are too large.
        forwards: Those of the step, as they were called.
        unkept: How many more it had, beyond the bounds.
        why_not: Why none was kept, where that is another reason.
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


@dataclass(frozen=True, slots=True)
class Weights:
    """Copies of what a rank holds of a model's parameters and buffers, on the CPU."""

    copies: list[torch.Tensor]
    versions: tuple[int, ...]

    def fit(self, model: nn.Module) -> bool:
        """Return whether the model still has such tensors."""
        held = held_by(model)
        return [t.shape for t in held] == [t.shape for t in self.copies]

    @torch.no_grad()
    def put_into(self, model: nn.Module) -> None:
        """Give the model these weights."""
        for held, copy in zip(held_by(model), self.copies, strict=True):
            held.copy_(copy)


class Evidence:
    """What is kept of the newest steps that were left out.

    Attributes:
        find_model: Finds what an optimizer trains, as the loop calls it; None where none does.
        loss: Returns the loss of the step that is being made; None where it is not known.
        save: Called with the steps when there is a new one.
        steps: The steps, oldest first.
        guarded_cell: The number of the newest cell that would leave out a step.
    """

    def __init__(self) -> None:
        self.find_model: Callable[[Optimizer], nn.Module | None] | None = None
        self.loss: Callable[[], float | None] = lambda: None
        self.save: Callable[[list[LeftOutStep]], None] = lambda _: None
        self.steps: list[LeftOutStep] = []
        self.guarded_cell = 0
        self._cell = 0
        self._watches_all = False  # models of the cell, whatever trains them
        self._forwards: WeakKeyDictionary[nn.Module, Forwards] = WeakKeyDictionary()
        self._given: GivenBatch | None = None
        self._new: LeftOutStep | None = None  # its number is known when it ends

    def begin_cell(
        self, number: int, *, watches_all: bool, optimizers: Iterable[Optimizer]
    ) -> None:
        """Watch the models of a cell, all of them where asked to."""
        self.end_cell()
        self._cell, self._watches_all = number, watches_all
        if watches_all:
            self.begin_guard()
        for optimizer in optimizers if watches_all else ():
            self.note_made(optimizer)

    def begin_guard(self) -> None:
        """Note that steps of the cell would be left out."""
        self.guarded_cell = self._cell

    def end_cell(self) -> None:
        """Watch none any more."""
        for forwards in self._forwards.values():
            forwards.remove()
        self._forwards.clear()
        self._given = self._new = None
        self._watches_all = False

    @property
    def is_on(self) -> bool:
        """Whether batches are to be noted."""
        return self._watches_all or bool(self._forwards)

    def note_made(self, made: object) -> None:
        """Watch what a new optimizer trains, in a cell all of whose models are watched."""
        if not self._watches_all or not isinstance(made, Optimizer) or self.find_model is None:
            return
        try:
            if (model := self.find_model(made)) is not None:
                self.watch(model)
        except Exception:  # in an optimizer's constructor, which is the program's
            _log.exception("The forwards of a model are not recorded")

    def watch(self, model: nn.Module) -> None:
        """Record the forwards of a model until the cell ends; where ranks can be asked for them."""
        if self.find_model is not None and model not in self._forwards:
            self._forwards[model] = Forwards(model, lambda: self._given, INPUT_BYTES)

    def makes(self, model: nn.Module, loss: Callable[[], MadeLoss] | None) -> None:
        """Note what `layout.step` makes of the model's next forward; None: nothing any more."""
        if (forwards := self._forwards.get(model)) is not None:
            forwards.loss = loss

    def gave(self, given: GivenBatch) -> None:
        """Note the batch that a loop gets."""
        self._given = given

    def keep(
        self, optimizer: Optimizer, parameters: list[torch.Tensor], *, is_of_all: bool
    ) -> None:
        """Keep the step that is being left out, before its gradients are dropped."""
        if self.find_model is None:
            return
        try:
            self._new = self._of(self.find_model(optimizer), parameters, is_of_all=is_of_all)
        except Exception:
            self._new = None
            _log.exception("A step that was left out cannot be looked into")

    def changed_buffers(self, optimizer: Optimizer) -> Mapping[int, torch.Tensor]:
        """Return the `Forwards.changed` of what an optimizer trains."""
        if self.find_model is None:
            return {}
        try:
            model = self.find_model(optimizer)
        except Exception:
            _log.exception("What a program has written into buffers is not known")
            return {}
        forwards = None if model is None else self._forwards.get(model)
        return {} if forwards is None else forwards.changed

    def stepped(self, step: int | None) -> None:
        """Note that an optimizer has stepped, and the number of the step if it was left out."""
        for forwards in self._forwards.values():
            forwards.stepped()
        if step is not None and self._new is not None:
            self._new.step = step
            self.steps = _within_bounds([*self.steps, self._new])
            self._new = None
            self.save(self.steps)

    def _of(
        self, model: nn.Module | None, parameters: list[torch.Tensor], *, is_of_all: bool
    ) -> LeftOutStep:
        gradients = norms_by_module(parameters, model)
        loss = self.loss()
        if model is None:
            return LeftOutStep(self._cell, 0, loss, gradients, is_of_all, lambda: None)
        forwards = self._forwards.get(model)
        return LeftOutStep(
            self._cell,
            0,
            loss,
            gradients,
            is_of_all,
            ref(model),
            tuple(module.training for module in model.modules()),
            self._weights_of(model, {} if forwards is None else forwards.changed),
            [] if forwards is None else list(forwards.made),
            0 if forwards is None else forwards.unkept,
        )

    def _weights_of(self, model: nn.Module, changed: Mapping[int, torch.Tensor]) -> Weights | None:
        """Return copies of the weights: those of the step before, where none has changed since."""
        held = held_by(model)
        if sum(tensor.nbytes for tensor in held) > WEIGHT_BYTES:
            return None
        parameters = sum(1 for _ in model.parameters())
        versions = tuple(tensor._version for tensor in held[:parameters])
        before = self.steps[-1] if self.steps else None
        if before is not None and before.cell == self._cell and before.model() is model:
            known = before.weights
            # Batch norm moves its statistics without a version: a forward has moved them.
            if known is not None and known.versions == versions and len(held) == parameters:
                return known
        # A forward has moved buffers: they count as they were before the step.
        kept = step_state.here().at_boundary(held[parameters:])
        live = (tensor.data_ptr() for tensor in held[parameters:])
        buffers = [changed.get(at, tensor) for at, tensor in zip(live, kept, strict=True)]
        copies = [tensor.to("cpu", copy=True) for tensor in [*held[:parameters], *buffers]]
        return Weights(copies, versions)


def _within_bounds(steps: list[LeftOutStep]) -> list[LeftOutStep]:
    """Return the newest steps of the newest cell; older ones without what is beyond the bounds."""
    newest = steps[-1]
    kept = [one for one in steps if one.cell == newest.cell][-MOST_LEFT_OUT:]
    forwards: list[Forward] = []
    for one in reversed(kept):
        if one.weights is not newest.weights:
            one.weights = None
        forwards += one.forwards
        if bytes_of(forwards) > INPUT_BYTES:
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
    named = {} if model is None else dict(plain(model).named_parameters())
    order = {id(p): name.rpartition(".")[0] for name, p in named.items()}
    place = {number: at for at, number in enumerate(order)}
    numbered = list(enumerate(parameters))
    norms: dict[str, float | None] = {}
    for number, parameter in sorted(numbered, key=lambda one: place.get(id(one[1]), len(place))):
        if parameter.grad is None:
            continue
        module = order.get(id(parameter), f"parameter {number}")
        norm, others = _norm(parameter.grad), norms.get(module, 0.0)
        norms[module] = None if norm is None or others is None else math.hypot(norm, others)
    return norms


def _norm(gradient: Any) -> float | None:
    local = local_part(gradient.detach())
    values = local._values() if local.is_sparse else local
    if not bool(torch.isfinite(values).all()):
        return None
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))
