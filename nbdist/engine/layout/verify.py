"""Prove a layout: some steps on the live model, the same in one process, and all put back.

    rank 0      the plain model, with the layout's weights, on the parts of all ranks (`reference`)
    all ranks   the live model on their own part; then each compares what it holds of every
                gradient with rank 0's, and moves its weights by plain SGD, as rank 0 does

Each rank compares its own part or copy, so a difference on one rank alone is found, and named with
it. Steps do not use the user's optimizer: what is proven is what it is given.

Main thread, all ranks.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from nbdist.engine import memory
from nbdist.engine.compat import torch_hooks
from nbdist.engine.layout import skeleton, whole
from nbdist.engine.layout.random_numbers import seed_part
from nbdist.engine.layout.reference import Part, Reference
from nbdist.engine.layout.unharmed import NoDropout, dropouts, unharmed, without_dropout
from nbdist.engine.layout.verdict import Difference, Noise, Proof, allowances, is_round_off, judge
from nbdist.engine.layout.whole import Place, Spread
from nbdist.errors import LayoutError

_SOURCE = 0  # the rank that computes the reference


class Provable(Spread, Protocol):
    """What must be known of a layout to prove it."""

    skeleton: nn.Module | None
    no_skeleton: str

    @property
    def name(self) -> str:
        """Its text."""
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """What is computed in a step.

    Attributes:
        inputs: This rank's; whatever the two functions take, made of tensors and plain values.
        samples: How many there are in it.
        live: Runs forward and backward on the live model; returns the detached loss, None where
            a rank has none.
        alone: Returns the loss of a plain model.
        cut: Cuts inputs into those of single forwards.
    """

    inputs: Any
    samples: int
    live: Callable[[Any], torch.Tensor | None]
    alone: Callable[[nn.Module, Any], torch.Tensor]
    cut: Callable[[Any], list[Any]]


def verify(layout: Provable, task: Task, steps: int) -> Proof:
    """Return how far the layout is from one process. Collective; changes nothing.

    Raises:
        LayoutError: It cannot be proven: no plain model, no room for it, or other inputs on ranks
            that work on the same samples.
    """
    if steps < 1:
        raise LayoutError(f"verify(steps={steps}) makes no step.", do="use 1 or more; 3 by itself")
    _refuse(layout)
    model = layout.model
    was_training = [module for module in model.modules() if module.training]
    if not model.training:
        model.train()
    try:
        # Inside of it nothing needs to be put back but what it puts back itself.
        with unharmed(model):
            return _Run(layout, task).proof(steps)
    finally:
        modes = set(was_training)
        for module in model.modules():
            module.training = module in modes


class _Run:
    """One proof under way."""

    def __init__(self, layout: Provable, task: Task) -> None:
        self._layout = layout
        self._task = task
        self._device = layout.mesh.device_type
        self._rank = dist.get_rank()
        self._part, self._count = layout.shape.data_part(self._rank)
        self._places = whole.table(layout)
        self._found: list[Difference] = []
        self._is_bit_equal = True
        self._losses: list[tuple[float, float]] = []
        self._reference: Reference | None = None

    def proof(self, steps: int) -> Proof:
        notes = self._compare_modes()
        self._compare_weights()
        gathered = self._gather_parts()
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
        return self._conclude(steps, notes)

    # -- before the first step

    def _compare_modes(self) -> list[str]:
        """Find modules that drop otherwise on some rank, or than when the layout was made."""
        mine = dropouts(self._layout.model)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        expected: dict[str, float] = {}
        for there in everyone:
            for name, p in there.items():
                expected.setdefault(name, p)
        for name, p in mine.items():
            if p != expected[name]:
                self._is_bit_equal = False
                self._note("dropout", name, 0, abs(p - expected[name]), 0.0, 0.0)
        plain = self._layout.skeleton
        assert plain is not None, "refused before"
        then = {
            name: float(module.p)
            for name, module in plain.named_modules()
            if isinstance(module, nn.modules.dropout._DropoutNd)
        }
        modules = dict(self._layout.model.named_modules())
        return [
            f"{name} drops {expected[name]:g} now, and {p:g} when the layout was made."
            for name, p in then.items()
            if name in modules and modules[name].training and expected[name] != p
        ]

    def _compare_weights(self) -> None:
        """Find parameters and buffers of which this rank's copy is not rank 0's."""
        saved = {name: place for name, place in self._places.items() if place.is_saved}
        held = whole.names(self._layout.model)
        source = self._whole_of_rank_0(saved)
        for name, full in source:
            if name in held:
                self._compare("weight", name, 0, held[name], full, Noise(0.0, 0.0), 0.0)

    def _whole_of_rank_0(self, saved: Mapping[str, Place]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, full in whole.tensors(self._layout):
            if name in saved:
                yield from whole.from_rank_0({name: saved[name]}, {name: full}, self._device)

    def _gather_parts(self) -> list[tuple[Any, float]]:
        """Return, on rank 0, what the ranks bring, each part once, with its weight."""
        on_cpu = _moved(self._task.inputs, "cpu")
        world, shape = dist.get_world_size(), self._layout.shape
        first_of = {shape.data_part(rank)[0]: rank for rank in reversed(range(world))}
        is_first = first_of[self._part] == self._rank
        mine = (_digest(on_cpu), self._task.samples, on_cpu if is_first else None)
        everyone: list[Any] | None = [None] * world if self._rank == _SOURCE else None
        dist.gather_object(mine, everyone, dst=_SOURCE)
        told: list[Any] = [None]
        if everyone is not None:
            told[0] = next(
                (
                    (first_of[part], rank)
                    for rank in range(world)
                    for part in [shape.data_part(rank)[0]]
                    if everyone[rank][0] != everyone[first_of[part]][0]
                ),
                None,
            )
        dist.broadcast_object_list(told, src=_SOURCE)
        if told[0] is not None:
            raise LayoutError(
                f"Ranks {told[0][0]} and {told[0][1]} bring different samples.",
                why=f'under "{self._layout.name}" they work on the same ones',
                do="take batches from nbdist.loader, which gives them the same",
            )
        if everyone is None:
            return []
        chosen = [everyone[first_of[part]] for part in range(self._count)]
        total = sum(samples for _, samples, _ in chosen)
        return [
            (_moved(inputs, self._device), samples * self._count / total if total else 1.0)
            for _, samples, inputs in chosen
        ]

    def _fill_skeleton(self) -> nn.Module | None:
        """Return, on rank 0, the plain model with the layout's weights, modes and flags."""
        plain = None
        if self._rank == _SOURCE:
            plain = copy.deepcopy(self._layout.skeleton)
            assert plain is not None, "refused before"
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
        dist.broadcast_object_list(told, src=_SOURCE)
        if isinstance(told[0], str):
            raise LayoutError(
                "The plain model does not run in one process with this batch and loss.",
                why=told[0],
                do="verify((x, y), loss_fn) calls loss_fn(model(x), y)",
            ) from failed
        noise, losses, rate = told[0]
        of_losses = [noise[f"loss {part}"] for part in range(len(losses))]
        if not is_round_off(of_losses, _epsilon_of(self._places.values())):
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
        loss = self._task.live(_moved(self._task.inputs, self._device))
        value = math.nan if loss is None else float(loss)
        if loss is not None:
            expected, own = losses[self._part], noise[f"loss {self._part}"]
            floor = max(own.floor, _epsilon(loss.dtype) * own.scale)
            by = abs(value - expected)
            self._is_bit_equal &= by == 0
            self._note(
                "loss", "", step, by, own.floor, allowances({"": Noise(floor, own.scale)}, 0)[""]
            )
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
        allowed = allowances(
            {name: noise[name] for name in trained}, _epsilon_of(self._places.values())
        )
        source = {} if self._reference is None else self._reference.gradients
        held = dict(self._layout.model.named_parameters())
        for name, full in whole.from_rank_0(trained, source, self._device):
            if name in held:
                live = _gradient(held[name])
                self._compare("gradient", name, step, live, full, noise[name], allowed[name])

    def _compare_buffers(self, step: int, noise: Mapping[str, Noise]) -> None:
        saved = {n: p for n, p in self._places.items() if p.is_saved and p.is_buffer}
        allowed = allowances({name: noise[name] for name in saved}, _epsilon_of(saved.values()))
        source = {} if self._reference is None else dict(self._reference.model.named_buffers())
        held = dict(self._layout.model.named_buffers())
        for name, full in whole.from_rank_0(saved, source, self._device):
            if name in held:
                live = held[name]
                self._compare("buffer", name, step, live, full, noise[name], allowed[name])

    @torch.no_grad()
    def _move(self, rate: float) -> None:
        for parameter in self._layout.model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-rate)
        if self._reference is not None:
            self._reference.move(rate)
        whole.settle(self._layout.model)

    # -- what is found

    def _compare(
        self,
        what: str,
        name: str,
        step: int,
        live: torch.Tensor,
        full: torch.Tensor,
        noise: Noise,
        allowed: float,
    ) -> None:
        mine = torch_hooks.local_part(live.detach())
        theirs = whole.part_of(full, live)
        if mine.shape != theirs.shape:
            self._is_bit_equal = False
            self._note(what, name, step, math.inf, noise.floor, allowed)
        elif mine.numel():
            by = float((mine.double() - theirs.double()).abs().max())
            self._is_bit_equal &= by == 0
            self._note(what, name, step, by, noise.floor, allowed)

    def _note(
        self, what: str, name: str, step: int, by: float, floor: float, allowed: float
    ) -> None:
        self._found.append(Difference(what, name, step, self._rank, by, floor, allowed))

    def _conclude(self, steps: int, notes: list[str]) -> Proof:
        """Put together what all ranks have found; the same on every rank."""
        mine = (_nearest(self._found), self._is_bit_equal, notes)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return judge(
            self._layout.name,
            steps,
            [difference for found, _, _ in everyone for difference in found],
            self._losses,
            dict.fromkeys(note for _, _, notes in everyone for note in notes),
            is_bit_equal=all(is_equal for _, is_equal, _ in everyone),
        )


def _refuse(layout: Provable) -> None:
    """Refuse what cannot be proven. All ranks alike.

    Raises:
        LayoutError: With the reason.
    """
    if layout.skeleton is None:
        raise LayoutError(
            "There is no plain model to compare this layout with.",
            why=layout.no_skeleton,
            do="keep what cannot be copied (groups, locks, files) out of the model",
        )
    synced = [
        name
        for name, module in layout.skeleton.named_modules()
        if isinstance(module, nn.SyncBatchNorm)
    ]
    if synced:
        raise LayoutError(
            f"{synced[0]} is a SyncBatchNorm, which one process cannot run part by part.",
            do="prove the model with BatchNorm, then convert it",
        )
    places = whole.table(layout)
    # The model, its gradients and copies to compare with; and the first two in float64.
    needed = sum(5 * place.nbytes + 16 * place.shape.numel() for place in places.values())
    free = memory.free_bytes()
    if layout.mesh.device_type == "cuda":
        free = min(free, torch.cuda.mem_get_info()[0])
    least = torch.tensor([free if dist.get_rank() == _SOURCE else 2**62])
    least = least.to(layout.mesh.device_type)
    dist.broadcast(least, src=_SOURCE)
    if needed > int(least):
        raise LayoutError(
            f"Rank {_SOURCE} has {int(least) / 2**30:.1f} GiB free, and one process needs some "
            f"{needed / 2**30:.1f} GiB for this model.",
            do="prove a model with fewer blocks, which has the same code",
        )


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


def _nearest(found: list[Difference]) -> list[Difference]:
    """Return of each tensor and step the furthest difference, and so what others must know."""
    kept: dict[tuple[str, str], Difference] = {}
    first: dict[tuple[str, str], Difference] = {}
    for difference in found:
        key = (difference.what, difference.name)
        if key not in kept or difference.share > kept[key].share:
            kept[key] = difference
        if not difference.is_allowed:
            first.setdefault(key, difference)
    return list(dict.fromkeys([*kept.values(), *first.values()]))


def _moved(inputs: Any, device: str) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to(device), inputs)


def _digest(inputs: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor):
            digest.update(repr((tuple(leaf.shape), leaf.dtype)).encode())
            flat = leaf.detach().contiguous().view(-1).view(torch.uint8)
            digest.update(flat.numpy().tobytes())
        elif isinstance(leaf, int | float | str | bool | None):
            digest.update(repr(leaf).encode())
    return digest.digest()


def _epsilon(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


def _epsilon_of(places: Any) -> float:
    return max((_epsilon(place.dtype) for place in places), default=0.0)
