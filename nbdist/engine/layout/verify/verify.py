"""Prove a layout: some steps on the live model, the same in one process, and all put back.

    rank 0      the plain model, with the layout's weights, on the parts of all ranks (`reference`)
    all ranks   the live model on their own part; then each compares its part of every
                gradient with rank 0's, and moves its weights by plain SGD, as rank 0 does

Each rank compares its own part or copy, so a difference on a single rank is found, and named with
it. Its inputs are what is proven, not the user's optimizer, unless asked for (`optimizer_parity`).

Main thread, all ranks.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from nbdist.engine.compat import torch_modules
from nbdist.engine.layout.policies import compress
from nbdist.engine.layout.policies.efficiency import FULL
from nbdist.engine.layout.verify.compare import Findings
from nbdist.engine.layout.verify.loss_sync import UnlikeError
from nbdist.engine.layout.verify.low_precision import epsilon_of
from nbdist.engine.layout.verify.optimizer_parity import LEAST_RATE, OptimizerParity
from nbdist.engine.layout.verify.outputs import Outputs
from nbdist.engine.layout.verify.preconditions import (
    Provable,
    Task,
    compare_modes,
    gather_parts,
    refuse,
)
from nbdist.engine.layout.verify.reference import SeenOutputs, largest_distance
from nbdist.engine.layout.verify.reference_run import Alone, ReferenceStep
from nbdist.engine.layout.verify.report import (
    MULTIPLE,
    Looked,
    LossSpread,
    Noise,
    OnePiece,
    Proof,
    allowances,
    some_of,
)
from nbdist.engine.layout.verify.restore import NoDropout, dropouts, unharmed, without_dropout
from nbdist.engine.layout.verify.sharded_run import ShardedRun
from nbdist.engine.layout.weights import full_tensors
from nbdist.engine.layout.weights.full_tensors import TensorFacts
from nbdist.shared.errors import LayoutError
from nbdist.shared.text import counted


def verify(layout: Provable, task: Task, steps: int, optimizer: Optimizer | None = None) -> Proof:
    """Return the distance of the layout from one process. Collective; changes nothing.

    With the user's optimizer, one like it makes the steps, and weights are compared after each.

    Raises:
        LayoutError: It cannot be proven: no plain model, no room for it, or other inputs on ranks
            that work on the same samples.
    """
    if steps < 1:
        raise LayoutError(f"verify(steps={steps}) makes no step.", do="use 1 or more; 3 by itself")
    return _made(layout, task, steps, optimizer).conclude()


def look_into(layout: Provable, task: Task) -> Looked:
    """Return the proof of one step, and with it that of what every module returns. As `verify`."""
    run = _made(layout, task, 1, keeps_outputs=True)
    return run.looked(run.conclude())


def _made(
    layout: Provable,
    task: Task,
    steps: int,
    optimizer: Optimizer | None = None,
    *,
    keeps_outputs: bool = False,
) -> "_Run":
    """Make the steps of a proof, and put all back. Collective."""
    bare = refuse(layout)
    model = layout.model
    was_training = [module for module in model.modules() if module.training]
    if not model.training:
        model.train()
    try:
        # Inside of it nothing needs to be put back but what it puts back itself.
        with suppress(UnlikeError), unharmed(model):
            run = _Run(layout, task, optimizer, keeps_outputs=keeps_outputs)
            run.make(bare, steps)
        return run
    finally:
        modes = set(was_training)
        for module in model.modules():
            module.training = module in modes


class _Run:
    """One proof under way."""

    def __init__(
        self,
        layout: Provable,
        task: Task,
        optimizer: Optimizer | None,
        *,
        keeps_outputs: bool = False,
    ) -> None:
        self._layout = layout
        self._keeps_outputs = keeps_outputs
        self._order: list[str] = []  # of outputs, in one process
        self._parts: set[str] = set()  # of them, those of which this rank has another shape
        self._unkept = 0
        self._optimizer = optimizer
        self._task = task
        self._device = layout.mesh.device_type
        self._part, _ = layout.shape.data_part(dist.get_rank())
        self._places = full_tensors.table(layout)
        low = layout.policies.precision
        self._is_low = low != FULL
        self._epsilon = max(_epsilon_of(self._places.values()), epsilon_of(low))
        self._findings = Findings()
        self._losses: list[tuple[float, float]] = []
        self._lost = 0.0  # of a loss, by its precision
        self._live = ShardedRun(layout, task)
        self._terms = [low.words] if self._is_low else []
        self._one_piece: OnePiece | None = None  # the first that has another loss, or cannot be
        self._notes: list[str] = []
        self._unreached: list[str] = []
        self._made = 0  # steps
        self._draws = False  # the model, though nothing is dropped

    def make(self, bare: nn.Module, steps: int) -> None:
        """Make the steps and keep the findings. Collective."""
        unlike, self._notes = compare_modes(self._layout.model, bare)
        for name, by in unlike.items():
            self._findings.note("dropout", name, 0, by, 0.0, 0.0)
        self._compare_weights()
        gathered = gather_parts(self._layout, self._task)
        alone = Alone(
            self._layout,
            bare,
            self._places,
            self._task,
            gathered,
            keeps_outputs=self._keeps_outputs,
        )
        parity = self._parity(alone)
        models = [self._layout.model] + ([] if alone.model is None else [alone.model])
        if any(dropouts(model) for model in models):
            self._notes.append(
                "Dropout was off during the comparison: ranks cannot draw one process' masks."
            )
        with without_dropout(*models), NoDropout(), self._uncompressed() as is_compressed:
            for step in range(1, steps + 1):
                reference = alone.step(step)
                self._draws |= reference.draws
                self._refuse_chance(reference, step)
                if reference.spread is LossSpread.DRIFT:
                    self._notes.append(
                        "Round-off grows fast in this model, as with batch norm on few "
                        f"samples: after {counted(self._made, 'step')} one process in float64 is "
                        "too far away to compare with."
                    )
                    self._terms += ["without compression"] if is_compressed else []
                    break
                self._made = step
                self._note_pieces(reference.one_piece, step)
                self._refuse_unreached(reference)
                seen = Outputs(is_on=self._keeps_outputs)
                try:
                    with seen.recording(self._layout.model, self._task.elsewhere):
                        loss = self._live.step(step, reference.scale)
                except UnlikeError as error:
                    self._note_missing(step, error.missing, reference.noise)
                    raise
                if self._keeps_outputs:
                    self._compare_outputs(step, seen, alone.outputs())
                self._compare_losses(step, loss, reference)
                self._compare_gradients(step, reference, alone)
                self._compare_buffers(step, reference.noise, alone.buffers)
                if step == steps and is_compressed:
                    percent = 100 * self._live.changed_by_compression(step, reference.scale)
                    self._terms.append(
                        f"without compression, which changes gradients by {percent:.2g} % here"
                    )
                if parity is None:
                    self._live.move(reference.rate)
                    alone.move(reference.rate)
                else:
                    parity.step(step, self._findings, alone.gradients, reference.noise)
                    full_tensors.settle(self._layout.model)
                    alone.follow()
        if alone.float64_failed:
            self._notes.append(
                "float64 could not be used, so the noise floor is that of weights moved by half a "
                f"unit of their last place: {alone.float64_failed}"
            )

    def conclude(self) -> Proof:
        """Combine the findings of all ranks. Collective.

        Raises:
            LayoutError: Stages and one process have drawn other random numbers.
        """
        compute = self._layout.policies.precision.compute
        if self._lost and compute != "fp32":
            self._notes.append(
                f"In {compute} the loss of one process is up to {100 * self._lost:.2g} % from that "
                "of float64, each with its own steps."
            )
        if self._is_low and not self._findings.is_bit_equal:
            self._notes.append(
                "Norms of gradients are compared: in low precision single numbers err by more."
            )
        proof = self._findings.conclude(
            self._layout.name,
            self._made,
            self._losses,
            self._notes,
            self._terms,
            self._unreached,
            self._one_piece,
        )
        if self._draws and self._layout.shape.pp > 1 and not proof.ok:
            raise LayoutError(
                "The model draws random numbers outside of dropout, so it cannot be verified "
                f'under "{self._layout.name}".',
                why="each stage draws its own, and one process draws others: what it computes "
                "from them differs",
                do="verify the model with what it draws set to nothing, such as a probability of 0",
            )
        return proof

    def looked(self, proof: Proof) -> Looked:
        """Return the proof with what is known of outputs. Collective."""
        everyone: list[Any] = [None] * dist.get_world_size()
        mine = (self._order, self._parts, self._unkept, self._findings.beyond())
        dist.all_gather_object(everyone, mine)
        orders, parts, unkept, beyond = zip(*everyone, strict=True)
        outputs = dict.fromkeys(name for order in orders for name in order)
        backward = reversed([name for name, p in self._places.items() if p.is_trained])
        return Looked(
            proof,
            tuple(outputs),
            tuple(backward),
            tuple(set[str]().union(*parts)),
            max(unkept),
            tuple(map(frozenset, beyond)),
        )

    # -- before the first step

    def _compare_weights(self) -> None:
        """Find parameters and buffers of which this rank's copy is not rank 0's."""
        saved = {name: place for name, place in self._places.items() if place.is_saved}
        held = full_tensors.names(self._layout.model)
        exact = Noise(0.0, 0.0)
        for name, full in self._whole_of_rank_0(saved):
            if name in held:
                self._findings.compare("weight", name, 0, held[name], full, exact, 0.0)

    def _parity(self, alone: Alone) -> OptimizerParity | None:
        """Return the optimizers of both sides; None where the user gave none. Collective."""
        if self._optimizer is None:
            return None
        parity = OptimizerParity(self._optimizer, self._layout, alone.model, self._places)
        self._terms.append(f"with {parity.recipe.name}")
        if parity.recipe.has_hooks:
            self._notes.append(
                f"Hooks of this {parity.recipe.name}'s steps were left out: they refer to it, and "
                "to what else they please."
            )
        if (rate := parity.recipe.raised_from) is not None:
            self._notes.append(
                f"{parity.recipe.name} stepped with a learning rate of {LEAST_RATE:g} in place of "
                f"{rate:g}, so that its updates stand out of the round-off of the weights."
            )
        return parity

    def _whole_of_rank_0(
        self, saved: Mapping[str, TensorFacts]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        wholes = (one for one in full_tensors.tensors(self._layout) if one[0] in saved)
        for pack in full_tensors.packs(saved.items()):
            held = dict(islice(wholes, len(pack)))
            yield from full_tensors.from_rank_0(dict(pack), held, self._device)

    # -- a step

    def _refuse_chance(self, reference: ReferenceStep, step: int) -> None:
        if reference.spread is LossSpread.CHANCE:
            raise LayoutError(
                "The model does not compute the same twice in one process, so it cannot be "
                "verified.",
                why="its losses differ by more than round-off; forward changes what is no buffer, "
                "such as a counter in Python, or draws random numbers outside of dropout",
                do="make what changes a buffer, or leave it out of the comparison",
            )
        if reference.spread is LossSpread.DRIFT and step == 1:
            raise LayoutError(
                "Round-off grows too far in this model to verify it with this batch.",
                why="one process computes another loss from weights moved by half a unit "
                "of their last place, or in float64",
                do="layout.verify((x, y), loss_fn) with a batch and a loss as you train with, of "
                "more samples, or with the model in float64",
            )

    def _note_pieces(self, one_piece: OnePiece | None, step: int) -> None:
        """Note the pieces on which both compute, and whether the loss in one piece differs."""
        if one_piece is None:
            return
        if step == 1 and self._layout.shape.pp > 1:
            self._terms.append(f"in {one_piece.count} micro-batches")
        if not one_piece.is_mean:
            self._one_piece = self._one_piece or one_piece

    def _refuse_unreached(self, reference: ReferenceStep) -> None:
        """Note parameters without a gradient; refuse them if a reducer would wait for one."""
        trained = [name for name, place in self._places.items() if place.is_trained]
        self._unreached = [name for name in trained if name not in reference.noise]
        if self._unreached and torch_modules.reducer_of(self._layout.model) is not None:
            raise LayoutError(
                f"This batch and loss do not use {some_of(self._unreached)}.",
                why=f'under "{self._layout.name}" a backward waits for the gradient of every '
                "parameter that is trained, so a training step would fail too",
                do="layout.verify((x, y), loss_fn) with what uses all, or freeze the rest "
                "(requires_grad_(False)) before parallelize",
            )

    @contextmanager
    def _uncompressed(self) -> Iterator[bool]:
        """Have gradients sent as they are; gives whether they would not be, by itself."""
        reducer = torch_modules.reducer_of(self._layout.model)
        rounds = self._layout.policies.precision.reduce != "fp32"  # as the one process does
        if reducer is None or rounds or not torch_modules.comm_hooks_of(reducer):
            yield False
            return
        with compress.switched(reducer, is_on=False) as unknown:
            self._notes += [
                f"The communication hook {name} was on: its changes are compared too."
                for name in unknown
            ]
            yield not unknown

    def _note_missing(
        self, step: int, missing: Mapping[int, list[str]], noise: Mapping[str, Noise]
    ) -> None:
        """Keep that this rank would not make some gradients."""
        for rank, names in missing.items():
            self._notes.append(
                f"Rank {rank} has no gradient for {some_of(names)}, and others do: a training "
                "step would wait for it without end, so none was made."
            )
        for name in missing.get(dist.get_rank(), ()):
            floor = noise[name].floor if name in noise else 0.0
            self._findings.note("gradient", name, step, math.inf, floor, MULTIPLE * floor)

    def _compare_losses(
        self, step: int, loss: torch.Tensor | None, reference: ReferenceStep
    ) -> None:
        value = math.nan if loss is None else float(loss)
        if loss is not None:
            expected, own = reference.losses[self._part], reference.noise[f"loss {self._part}"]
            floor = max(own.floor, _epsilon(loss.dtype) * own.scale)
            allowed = allowances({"": Noise(floor, own.scale)}, 0)[""]
            if self._is_low:
                allowed = max(allowed, self._epsilon * own.scale)
            self._findings.note("loss", "", step, abs(value - expected), own.floor, allowed)
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, value)
        of_parts = {
            self._layout.shape.data_part(rank)[0]: loss
            for rank, loss in enumerate(seen)
            if not math.isnan(loss)
        }
        live = sum(of_parts.values()) / len(of_parts) if of_parts else math.nan
        alone = sum(reference.losses) / len(reference.losses)
        self._losses.append((live, alone))
        if reference.exact:
            exact = sum(reference.exact) / len(reference.exact)
            self._lost = max(self._lost, abs(alone - exact) / abs(exact) if exact else 0.0)

    def _compare_gradients(self, step: int, reference: ReferenceStep, alone: Alone) -> None:
        trained = {n: p for n, p in self._places.items() if p.is_trained and n in reference.noise}
        live = self._live.gradients()
        if self._is_low:
            self._findings.compare_norms(
                "gradient",
                step,
                live,
                full_tensors.from_rank_0(trained, alone.gradients, self._device),
                full_tensors.from_rank_0(trained, alone.errors, self._device),
                self._epsilon,
            )
            return
        noise = {name: reference.noise[name] for name in trained}
        allowed = allowances(noise, self._epsilon)
        for name, full in full_tensors.from_rank_0(trained, alone.gradients, self._device):
            if name in live:
                self._findings.compare(
                    "gradient", name, step, live[name], full, noise[name], allowed[name]
                )

    def _compare_outputs(self, step: int, seen: Outputs, alone: SeenOutputs) -> None:
        """Compare what modules have returned here with what they do in one process."""
        self._order = list(alone.tensors)
        self._unkept = seen.unkept + alone.unkept
        mine = {n: t.cpu() for n, t in seen.tensors.items() if n in alone.tensors}
        self._parts = {n for n, t in mine.items() if t.shape != alone.tensors[n].shape}
        whole = {n: t for n, t in alone.tensors.items() if n in mine and n not in self._parts}
        if self._is_low:
            finite = {n: t for n, t in whole.items() if t.isfinite().all()}
            errors = ((name, alone.errors[name]) for name in finite)
            self._findings.compare_norms(
                "output", step, mine, finite.items(), errors, self._epsilon
            )
            return
        allowed = allowances({name: alone.noise[name] for name in whole}, self._epsilon)
        for name, tensor in whole.items():
            by = largest_distance(mine[name], tensor)
            self._findings.note("output", name, step, by, alone.noise[name].floor, allowed[name])

    def _compare_buffers(
        self, step: int, noise: Mapping[str, Noise], source: Mapping[str, torch.Tensor]
    ) -> None:
        saved = {n: p for n, p in self._places.items() if p.is_saved and p.is_buffer}
        allowed = allowances({name: noise[name] for name in saved}, _epsilon_of(saved.values()))
        held = dict(self._layout.model.named_buffers())
        for name, full in full_tensors.from_rank_0(saved, source, self._device):
            if name in held:
                self._findings.compare(
                    "buffer", name, step, held[name], full, noise[name], allowed[name]
                )


def _epsilon(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


def _epsilon_of(places: Iterable[TensorFacts]) -> float:
    return max((_epsilon(place.dtype) for place in places), default=0.0)
