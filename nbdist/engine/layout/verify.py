"""Prove a layout: some steps on the live model, the same in one process, and all put back.

    rank 0      the plain model, with the layout's weights, on the parts of all ranks (`reference`)
    all ranks   the live model on their own part; then each compares what it holds of every
                gradient with rank 0's, and moves its weights by plain SGD, as rank 0 does

Each rank compares its own part or copy, so a difference on one rank alone is found, and named with
it. Steps do not use the user's optimizer: what is proven is what it is given.

Main thread, all ranks.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nbdist.engine.layout import skeleton, whole
from nbdist.engine.layout.findings import Findings
from nbdist.engine.layout.provable import (
    SOURCE,
    Provable,
    Task,
    compare_modes,
    gather_parts,
    moved,
    refuse,
)
from nbdist.engine.layout.random_numbers import seed_part
from nbdist.engine.layout.reference import Part, Reference
from nbdist.engine.layout.unharmed import NoDropout, dropouts, unharmed, without_dropout
from nbdist.engine.layout.verdict import Noise, Proof, allowances, is_round_off
from nbdist.engine.layout.whole import Place
from nbdist.errors import LayoutError


def verify(layout: Provable, task: Task, steps: int) -> Proof:
    """Return how far the layout is from one process. Collective; changes nothing.

    Raises:
        LayoutError: It cannot be proven: no plain model, no room for it, or other inputs on ranks
            that work on the same samples.
    """
    if steps < 1:
        raise LayoutError(f"verify(steps={steps}) makes no step.", do="use 1 or more; 3 by itself")
    bare = refuse(layout)
    model = layout.model
    was_training = [module for module in model.modules() if module.training]
    if not model.training:
        model.train()
    try:
        # Inside of it nothing needs to be put back but what it puts back itself.
        with unharmed(model):
            return _Run(layout, task, bare).proof(steps)
    finally:
        modes = set(was_training)
        for module in model.modules():
            module.training = module in modes


class _Run:
    """One proof under way."""

    def __init__(self, layout: Provable, task: Task, bare: nn.Module) -> None:
        self._layout = layout
        self._task = task
        self._bare = bare
        self._device = layout.mesh.device_type
        self._part, _ = layout.shape.data_part(dist.get_rank())
        self._places = whole.table(layout)
        self._epsilon = _epsilon_of(self._places.values())
        self._findings = Findings()
        self._losses: list[tuple[float, float]] = []
        self._reference: Reference | None = None

    def proof(self, steps: int) -> Proof:
        """Make the steps and say what was found."""
        unlike, notes = compare_modes(self._layout.model, self._bare)
        for name, by in unlike.items():
            self._findings.note("dropout", name, 0, by, 0.0, 0.0)
        self._compare_weights()
        gathered = gather_parts(self._layout, self._task)
        plain = self._fill_skeleton()
        models = [self._layout.model] + ([] if plain is None else [plain])
        if any(dropouts(model) for model in models):
            notes.append("Nothing was dropped while proving: ranks cannot draw one process' masks.")
        rate = 0.0
        with without_dropout(*models), NoDropout():
            for step in range(1, steps + 1):
                noise, losses, told = self._reference_step(step, rate, plain, gathered)
                rate = told
                self._live_step(step, losses, noise)
                self._compare_gradients(step, noise)
                self._compare_buffers(step, noise)
                self._move(rate)
        if self._reference is not None and self._reference.float64_failed:
            notes.append(
                "float64 could not be used, so the noise floor is that of weights moved by half a "
                f"unit of their last place: {self._reference.float64_failed}"
            )
        return self._findings.conclude(self._layout.name, steps, self._losses, notes)

    # -- before the first step

    def _compare_weights(self) -> None:
        """Find parameters and buffers of which this rank's copy is not rank 0's."""
        saved = {name: place for name, place in self._places.items() if place.is_saved}
        held = whole.names(self._layout.model)
        exact = Noise(0.0, 0.0)
        for name, full in self._whole_of_rank_0(saved):
            if name in held:
                self._findings.compare("weight", name, 0, held[name], full, exact, 0.0)

    def _whole_of_rank_0(self, saved: Mapping[str, Place]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, full in whole.tensors(self._layout):
            if name in saved:
                yield from whole.from_rank_0({name: saved[name]}, {name: full}, self._device)

    def _fill_skeleton(self) -> nn.Module | None:
        """Return, on rank 0, the plain model with the layout's weights, modes and flags."""
        plain = None
        if dist.get_rank() == SOURCE:
            plain = copy.deepcopy(self._bare)
            skeleton.materialise(plain, self._device)
            _copy_modes(self._layout.model, plain)
        empty = {} if plain is None else whole.names(plain)
        for name, full in whole.tensors(self._layout):
            if plain is not None and name in empty:
                whole.put(empty[name], full)
                if self._places[name].is_trained != empty[name].requires_grad:
                    empty[name].requires_grad_(self._places[name].is_trained)
        return plain

    # -- a step

    def _reference_step(
        self,
        step: int,
        rate: float,
        plain: nn.Module | None,
        gathered: list[tuple[Any, float]],
    ) -> tuple[dict[str, Noise], list[float], float]:
        """Have rank 0 compute; return, everywhere, noise by name, losses, and the rate of steps."""
        told: list[Any] = [None]
        failed: Exception | None = None
        if plain is not None:
            try:
                if self._reference is None:
                    parts = [Part(self._task.cut(inputs), weight) for inputs, weight in gathered]
                    self._reference = Reference(plain, self._task.alone, parts)
                noise = self._reference.step(step)
                rate = rate or self._reference.pace()
                told[0] = (noise, self._reference.losses, rate)
            except Exception as error:
                failed = error
                told[0] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        dist.broadcast_object_list(told, src=SOURCE)
        if isinstance(told[0], str):
            raise LayoutError(
                "The plain model does not run in one process with this batch and loss.",
                why=told[0],
                do="verify((x, y), loss_fn) calls loss_fn(model(x), y)",
            ) from failed
        noise, losses, rate = told[0]
        of_losses = [noise[f"loss {part}"] for part in range(len(losses))]
        if not is_round_off(of_losses, self._epsilon):
            raise LayoutError(
                "The model does not compute the same twice in one process: nothing can be proven.",
                why="its losses differ by more than round-off; forward changes what is no buffer, "
                "such as a counter in Python, or draws random numbers outside of dropout",
                do="make what changes a buffer, or leave it out for the proof",
            )
        return noise, losses, rate

    def _live_step(self, step: int, losses: list[float], noise: Mapping[str, Noise]) -> None:
        for parameter in self._layout.model.parameters():
            parameter.grad = None
        seed_part(step, self._part)
        loss = self._task.live(moved(self._task.inputs, self._device))
        value = math.nan if loss is None else float(loss)
        if loss is not None:
            expected, own = losses[self._part], noise[f"loss {self._part}"]
            floor = max(own.floor, _epsilon(loss.dtype) * own.scale)
            allowed = allowances({"": Noise(floor, own.scale)}, 0)[""]
            self._findings.note("loss", "", step, abs(value - expected), own.floor, allowed)
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, value)
        of_parts = {
            self._layout.shape.data_part(rank)[0]: loss
            for rank, loss in enumerate(seen)
            if not math.isnan(loss)
        }
        live = sum(of_parts.values()) / len(of_parts) if of_parts else math.nan
        self._losses.append((live, sum(losses) / len(losses)))

    def _compare_gradients(self, step: int, noise: Mapping[str, Noise]) -> None:
        trained = {n: p for n, p in self._places.items() if p.is_trained and n in noise}
        allowed = allowances({name: noise[name] for name in trained}, self._epsilon)
        source = {} if self._reference is None else self._reference.gradients
        held = dict(self._layout.model.named_parameters())
        for name, full in whole.from_rank_0(trained, source, self._device):
            if name in held:
                live = _gradient(held[name])
                self._findings.compare(
                    "gradient", name, step, live, full, noise[name], allowed[name]
                )

    def _compare_buffers(self, step: int, noise: Mapping[str, Noise]) -> None:
        saved = {n: p for n, p in self._places.items() if p.is_saved and p.is_buffer}
        allowed = allowances({name: noise[name] for name in saved}, _epsilon_of(saved.values()))
        source = {} if self._reference is None else dict(self._reference.model.named_buffers())
        held = dict(self._layout.model.named_buffers())
        for name, full in whole.from_rank_0(saved, source, self._device):
            if name in held:
                self._findings.compare(
                    "buffer", name, step, held[name], full, noise[name], allowed[name]
                )

    @torch.no_grad()
    def _move(self, rate: float) -> None:
        for parameter in self._layout.model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-rate)
        if self._reference is not None:
            self._reference.move(rate)
        whole.settle(self._layout.model)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient, cut as the parameter is; zeros where it has none."""
    gradient: Any = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter.detach())
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        cut: torch.Tensor = gradient.redistribute(placements=parameter.placements)
        return cut
    whole_gradient: torch.Tensor = gradient
    return whole_gradient


def _copy_modes(live: nn.Module, plain: nn.Module) -> None:
    """Give the plain model the live one's modes: a part may be in evaluation on purpose."""
    modes = {name: module.training for name, module in live.named_modules()}
    for name, module in plain.named_modules():
        module.training = modes.get(name, live.training)


def _epsilon(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


def _epsilon_of(places: Iterable[Place]) -> float:
    return max((_epsilon(place.dtype) for place in places), default=0.0)
