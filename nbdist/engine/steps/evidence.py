"""Keep, in this rank's memory, what a step can be looked into with.

A step that `guard` leaves out has changed no weight, so its forward can run again: kept are its
inputs, the random numbers and the weights that it began with, its loss and the norms of its
gradients. Inputs are kept by reference and weights copied, both within bounds and only then; while
steps are sound, references to one step's inputs are all that is held. The steps of one cell are
kept, until another leaves one out. Nothing leaves the rank's memory, for it holds people's samples,
but where a cell asks for it (`evidence_file`). Such a cell's sound steps are kept, too, with what
makes their weights again (`sound_steps`).

Threads: as `guard`.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from nbdist.engine.steps import step_state
from nbdist.engine.steps.forwards import Clip, Forwards, GivenBatch, MadeLoss
from nbdist.engine.steps.kept_step import (
    KeptStep,
    Weights,
    held_by,
    is_start,
    norms_by_module,
    within_bounds,
)
from nbdist.engine.steps.optimizer_options import options_of
from nbdist.engine.steps.optimizer_states import States, bytes_of_state, host_copies, inside
from nbdist.engine.steps.optimizer_wrapper import Wrapper
from nbdist.engine.steps.sound_steps import START_BYTES, Norms, SoundStep, Training
from nbdist.shared.error_text import named
from nbdist.shared.text import name_bytes

Optimizer = torch.optim.Optimizer

INPUT_BYTES: Final = 256 << 20  # of the inputs of all of them
WEIGHT_BYTES: Final = 256 << 20  # of the weights of the newest, in the host's memory

_log = logging.getLogger("nbdist.guard")


class Evidence:
    """What is kept of the newest steps.

    Attributes:
        find_model: Finds what an optimizer trains, as the loop calls it; None where none does.
        loss: Returns the loss of the step that is being made; None where it is not known.
        save: Called with the steps when another one was left out.
        steps: The steps, oldest first.
        guarded_cell: The number of the newest cell that would leave out a step.
    """

    def __init__(self) -> None:
        self.find_model: Callable[[Optimizer], nn.Module | None] | None = None
        self.loss: Callable[[], float | None] = lambda: None
        self.save: Callable[[list[KeptStep]], None] = lambda _: None
        self.steps: list[KeptStep] = []
        self.guarded_cell = 0
        self._cell = 0
        self._watches_all = False  # models of the cell, whatever trains them
        self._forwards: WeakKeyDictionary[nn.Module, Forwards] = WeakKeyDictionary()
        self._given: GivenBatch | None = None
        self._new: KeptStep | None = None  # its number is known when it ends
        self._new_of: Callable[[], Optimizer | None] = lambda: None
        self._keeps_sound = False
        self._training: Training | None = None
        self._notice = ""

    def begin_cell(
        self,
        number: int,
        *,
        watches_all: bool,
        optimizers: Iterable[Optimizer],
        keeps_sound: bool = False,
    ) -> None:
        """Watch the models of a cell, all of them where asked to.

        Args:
            number: Of the cell.
            watches_all: Whether to watch whatever it trains.
            optimizers: Those that live as it begins.
            keeps_sound: Whether steps are kept that are not left out, too.
        """
        self.end_cell()
        self._cell, self._watches_all = number, watches_all
        self._keeps_sound = keeps_sound
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
        if self._training is not None:
            self._training.modules.clear()  # what is kept keeps no model alive
        self._given = self._new = self._training = None
        self._watches_all = self._keeps_sound = False

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

    def made_loss(self, model: nn.Module, loss: torch.Tensor | None) -> None:
        """Note the loss that `layout.step` has made of the model's newest forward."""
        if self._keeps_sound and (forwards := self._forwards.get(model)) is not None:
            forwards.made_loss(loss)

    def clips(self, parameters: Sequence[torch.Tensor], arguments: Clip) -> None:
        """Note that gradients are about to be clipped; of a part of a model's, nothing."""
        for model, forwards in self._forwards.items() if self._keeps_sound else ():
            if list(map(id, parameters)) == list(map(id, model.parameters())):
                forwards.clips.append(arguments)

    def gave(self, given: GivenBatch) -> None:
        """Note the batch that a loop gets."""
        self._given = given

    def keep(
        self, optimizer: Optimizer, parameters: list[torch.Tensor], *, is_of_all: bool
    ) -> None:
        """Keep the step that is being left out, before its gradients are dropped."""
        if self.find_model is None:
            return
        self._new_of = ref(optimizer)
        try:
            self._new = self._of(self.find_model(optimizer), parameters, is_of_all=is_of_all)
        except Exception:
            self._new = None
            _log.exception("A step that was left out cannot be looked into")

    def keep_sound(
        self,
        optimizer: Optimizer,
        parameters: list[torch.Tensor],
        norms: torch.Tensor | None,
        *,
        is_of_all: bool,
        has_closure: bool,
    ) -> None:
        """Keep the step that an optimizer is about to make, in a cell that keeps all.

        Args:
            optimizer: Whose step.
            parameters: Its.
            norms: Of each gradient that there is, in their order.
            is_of_all: Whether all ranks make it.
            has_closure: Whether it calls a closure, which has been called.
        """
        if not self._keeps_sound or self.find_model is None:
            return
        running = self._new_of() if self._new is not None else None
        if running is not None and running is not optimizer and inside(running) is optimizer:
            return  # its own step
        try:
            made = Norms.of(parameters, norms)
            self._new = self._sound(optimizer, made, is_of_all=is_of_all, has_closure=has_closure)
            self._new_of = ref(optimizer)
        except Exception as error:
            self._new = None
            self._stop_keeping(named(error).rstrip("."))
            _log.exception("The steps of this cell are no longer kept")

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

    def stepped(self, optimizer: Optimizer, step: int | None, *, is_left_out: bool) -> None:
        """Note that an optimizer has stepped.

        Args:
            optimizer: That one.
            step: The number of the step; None where it is not known.
            is_left_out: Whether it was left out, and is no other's in the same step.
        """
        for forwards in self._forwards.values():
            forwards.stepped()
        new = self._new
        if new is None or self._new_of() is not optimizer:
            return
        if new.sound is None and not is_left_out:
            return
        if new.sound is None or step is not None:
            new.step = step or 0
        else:
            new.step = new.sound.number + 1
        self._new = None
        self.steps = within_bounds([*self.steps, new], INPUT_BYTES)
        if is_left_out:
            self.save(self.steps)

    def take_notices(self) -> tuple[str, ...]:
        """Return what is to be said of the cell, once."""
        said, self._notice = self._notice, ""
        return (said,) if said else ()

    def _stop_keeping(self, why: str) -> None:
        self._keeps_sound = False
        self._notice = f"Steps of this cell that were not left out are no longer kept: {why}."

    def _sound(
        self, optimizer: Optimizer, norms: Norms, *, is_of_all: bool, has_closure: bool
    ) -> KeptStep | None:
        if self._training is None:
            assert self.find_model is not None, "else no step is kept"
            if (model := self.find_model(optimizer)) is None:
                self._stop_keeping("no layout, no DDP and no variable of the cells names the model")
                return None
            self._training = Training(optimizer, model)
        training = self._training
        model = training.model()
        if training.optimizer() is not optimizer or model is None:
            training.why_not = "several optimizers step in its cell"
            return None
        if training.sums_otherwise():
            for one in self.steps:
                if one.sound is not None and one.sound.of is training:
                    one.sound.why_not = "DDP has summed its gradients in another order since"
        forwards = self._forwards.get(model)
        made = [] if forwards is None else list(forwards.made)
        unkept, size = (0, 0) if forwards is None else (forwards.unkept, forwards.size_bytes)
        why_not = "its optimizer calls a closure" if has_closure else ""
        if isinstance(optimizer, Wrapper):
            why_not = f"its optimizer is a {type(optimizer).__name__}"
        number = training.made
        clips = () if forwards is None else tuple(forwards.clips)
        sound = SoundStep(training, number, options_of(optimizer), norms, clips, why_not)
        kept = KeptStep(
            self._cell,
            0,
            self.loss(),
            {},
            is_of_all,
            training.model,
            tuple(module.training for module in training.modules),
            None,
            made,
            unkept,
            sound=sound,
            size_bytes=size,
        )
        can_run = bool(made) and not unkept
        if training.needs_start(size, INPUT_BYTES, can_run=can_run) and not why_not:
            changed = {} if forwards is None else forwards.changed
            self._make_start(kept, sound, optimizer, model, changed)
        return kept

    def _make_start(
        self,
        kept: KeptStep,
        sound: SoundStep,
        optimizer: Optimizer,
        model: nn.Module,
        changed: Mapping[int, torch.Tensor],
    ) -> None:
        """Copy the weights and the optimizer's state, into the memory of the older of two starts.

        The steps between that one and the newer can be made again no more.
        """
        size = sum(t.nbytes for t in held_by(model)) + bytes_of_state(optimizer)
        if size > START_BYTES:
            sound.of.why_not = (
                f"its weights and its optimizer's states take more than {name_bytes(START_BYTES)}"
            )
            return
        starts = [one for one in self.steps if one.cell == self._cell and is_start(one)]
        older = starts[-2] if len(starts) > 1 else None
        weights: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        if older is not None and older.sound is not None:
            weights = older.weights.copies if older.weights else []
            states = older.sound.states.copies if older.sound.states else []
            self.steps = [one for one in self.steps if one is not older]
        try:
            sound.states = States.of(optimizer, states)
        except TypeError as error:
            sound.of.why_not = f"its optimizer remembers {error}"
            return
        held = self._held_before(model, changed)
        kept.weights = Weights(host_copies(held, weights))

    def _of(
        self, model: nn.Module | None, parameters: list[torch.Tensor], *, is_of_all: bool
    ) -> KeptStep:
        gradients = norms_by_module(parameters, model)
        loss = self.loss()
        if model is None:
            return KeptStep(self._cell, 0, loss, gradients, is_of_all, lambda: None)
        forwards = self._forwards.get(model)
        return KeptStep(
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
            size_bytes=0 if forwards is None else forwards.size_bytes,
        )

    def _weights_of(self, model: nn.Module, changed: Mapping[int, torch.Tensor]) -> Weights | None:
        """Return copies of the weights: those of the step before, where none has changed since."""
        held = held_by(model)
        if sum(tensor.nbytes for tensor in held) > WEIGHT_BYTES:
            return None
        parameters = sum(1 for _ in model.parameters())
        versions = tuple(tensor._version for tensor in held[:parameters])
        before = next((one for one in reversed(self.steps) if one.sound is None), None)
        if before is not None and before.cell == self._cell and before.model() is model:
            known = before.weights
            # Batch norm moves its statistics without a version: a forward has moved them.
            if known is not None and known.versions == versions and len(held) == parameters:
                return known
        before_step = self._held_before(model, changed)
        copies = [tensor.to("cpu", copy=True) for tensor in before_step]
        return Weights(copies, versions)

    def _held_before(
        self, model: nn.Module, changed: Mapping[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return what `held_by` does; a forward has moved buffers: these as before the step."""
        held = held_by(model)
        parameters = sum(1 for _ in model.parameters())
        kept = step_state.here().at_boundary(held[parameters:])
        live = (tensor.data_ptr() for tensor in held[parameters:])
        buffers = [changed.get(at, tensor) for at, tensor in zip(live, kept, strict=True)]
        return [*held[:parameters], *buffers]
