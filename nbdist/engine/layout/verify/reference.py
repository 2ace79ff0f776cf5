"""The same steps in one process: the plain model, on the same split, in the same order.

The layout is compared with one model in its own dtype. A second one in float64 and
more from weights moved by half a unit of their last place show how far correct results differ (see
`report`). Each part of the batch is a separate forward, as on the ranks: batch norm sees what it
sees there. In low precision the first one computes as the layout does (`low_precision`), and the
second one shows the error of such a computation.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from nbdist.engine.compat import torch_quantized
from nbdist.engine.layout.plan.inputs import join
from nbdist.engine.layout.plan.random_numbers import seed_part, states
from nbdist.engine.layout.verify.low_precision import Lowered
from nbdist.engine.layout.verify.outputs import Outputs
from nbdist.engine.layout.verify.report import LossSpread, Noise, OnePiece, spread_of
from nbdist.shared.error_text import named
from nbdist.shared.errors import LayoutError

MOVE = 0.01  # by which share of their norm a step changes the weights
_LEAST_SCALE = 2.0**-24  # of a loss
# Samples of round-off: `report` says why so many. Norms, as in low precision, hardly vary.
_SAMPLES, _SAMPLES_OF_NORMS = 4, 2

# Pieces computed in one, without gradients: this takes the memory of about one with them.
_PIECES = 4

LossOf = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of the batch.

    Attributes:
        pieces: The arguments of `LossOf`, one per forward: micro-batches with pp, otherwise all at
            once.
        weight: Its number of samples, in units of the mean part's.
    """

    pieces: list[Any]
    weight: float


@dataclass(frozen=True, slots=True)
class SeenOutputs:
    """What modules have returned for one part of the batch.

    Attributes:
        tensors: By name, in the order in which modules ended.
        noise: The round-off of each.
        errors: How far each is from the truth, element by element; in low precision alone.
        unkept: How many there were beyond the bound.
    """

    tensors: dict[str, torch.Tensor]
    noise: dict[str, Noise]
    errors: dict[str, torch.Tensor]
    unkept: int


class Reference:
    """The plain model with weights, in one process."""

    def __init__(
        self,
        model: nn.Module,
        loss_of: LossOf,
        parts: Sequence[Part],
        lower: Callable[[nn.Module], Lowered | None] | None = None,
        *,
        keeps_outputs: bool = False,
    ) -> None:
        """Take over `model`, which has the layout's weights, modes and flags.

        Args:
            model: Plain.
            loss_of: Runs it on a piece of a part.
            parts: Those of all ranks.
            lower: Has a model compute in low precision, or says by None that it does as it is.
            keeps_outputs: Keep what modules return, too.
        """
        self.model = model
        self.outputs: list[SeenOutputs] = []  # of the last step, by part, if they are kept
        self.losses: list[float] = []
        self.exact: list[float] = []  # the same in float64; empty where that cannot be
        self.gradients: dict[str, torch.Tensor] = {}
        self.errors: dict[str, torch.Tensor] = {}  # of gradients in low precision, by element
        self.float64_failed = ""
        self.spread = LossSpread.ROUND_OFF  # of the losses of the last step
        self.one_piece: OnePiece | None = None  # of the last step, where its batch is cut
        self.draws = False  # random numbers, though nothing is dropped
        self._loss_of = loss_of
        self._parts = parts
        self._double = self._in_float64()
        self._lowered = lower(model) if lower is not None else None
        self._random = torch.Generator().manual_seed(0)
        self._keeps_outputs = keeps_outputs
        self._seen: list[list[Outputs]] = []  # of each computation of a step, by part

    def step(self, step: int, scale: float = 1.0) -> dict[str, Noise]:
        """Compute the gradients of a step; return the round-off of each tensor.

        A parameter without a gradient, on which the loss does not depend, is left out. The losses
        of the parts are under "loss 0", "loss 1", and so on.

        Args:
            step: Its number, from 1.
            scale: The largest of the loss; `scale` is then the one at which nothing overflows.

        Raises:
            LayoutError: A loss or a gradient is not finite.
        """
        self._seen = []
        others = [self._run_double(step)] if self._double is not None else []
        self.exact = self._losses_in(others[0]) if self._double is not None else []
        self.one_piece = self._in_one_piece()
        known = len(self._seen)
        self._fit_scale(step, scale)
        del self._seen[known:]
        samples = _SAMPLES if self._lowered is None else _SAMPLES_OF_NORMS
        for _ in range(samples - (self._double is not None)):
            with self._moved():
                others.append(self._run(self.model, self._parts, step))
        buffers = list(self.model.buffers())
        before = [buffer.clone() for buffer in buffers]
        mine = self._run(self.model, self._parts, step)
        _refuse_infinite(mine)
        if self._keeps_outputs:
            *seen, own = self._seen
            self.outputs = [
                _outputs_of(
                    part, [other[number] for other in seen], with_errors=bool(self._lowered)
                )
                for number, part in enumerate(own)
            ]
            self._seen = []
        self.losses = self._losses_in(mine)
        self.gradients = {
            name: p.grad for name, p in self._trained(self.model) if p.grad is not None
        }
        if self._lowered is not None:
            self.errors = {name: _errors(g, name, others) for name, g in self.gradients.items()}
        noise = _noise(mine, others)
        losses = [noise[f"loss {part}"] for part in range(len(self._parts))]
        self.spread = spread_of(losses, self._epsilon)
        if self.spread is not LossSpread.ROUND_OFF:
            # The twins have moved by their own gradients: compute the same weights once more.
            _set(buffers, before)
            again = _noise(mine, [self._run(self.model, self._parts, step)])
            repeated = [again[f"loss {part}"] for part in range(len(self._parts))]
            if spread_of(repeated, self._epsilon) is not LossSpread.ROUND_OFF:
                self.spread = LossSpread.CHANCE
        return noise

    def _losses_in(self, found: Mapping[str, torch.Tensor]) -> list[float]:
        return [float(found[f"loss {part}"]) for part in range(len(self._parts))]

    @property
    def _epsilon(self) -> float:
        own = max(float(torch.finfo(p.dtype).eps) for p in self.model.parameters())
        return own if self._lowered is None else max(own, self._lowered.epsilon)

    @property
    def scale(self) -> float:
        """Of the loss in the last step."""
        return 1.0 if self._lowered is None else self._lowered.scale

    def _fit_scale(self, step: int, largest: float) -> None:
        """Halve the loss scale until nothing overflows, as a scaler does over some steps."""
        if self._lowered is None:
            return
        buffers = list(self.model.buffers())
        before = [buffer.clone() for buffer in buffers]
        self._lowered.scale = largest
        while self._lowered.scale > _LEAST_SCALE and largest != 1:
            found = self._run(self.model, self._parts, step)
            _set(buffers, before)
            if all(value.isfinite().all() for value in found.values()):
                return
            self._lowered.scale /= 2

    def pace(self) -> float:
        """Return the learning rate at which a step moves the weights by `MOVE` of their norm."""
        weights = sum(float(p.detach().double().norm()) ** 2 for _, p in self._trained(self.model))
        gradients = sum(float(g.double().norm()) ** 2 for g in self.gradients.values())
        return MOVE * float((weights / gradients) ** 0.5) if gradients and weights else MOVE

    @torch.no_grad()
    def move(self, rate: float) -> None:
        """Make a step of plain SGD."""
        for model in (self.model, self._double):
            for _, parameter in self._trained(model) if model is not None else ():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-rate)

    @torch.no_grad()
    def follow(self) -> None:
        """Let the model in float64 have the weights that an optimizer has left."""
        if self._double is not None:
            both = (self._trained(model) for model in (self._double, self.model))
            _set(*([p for _, p in trained] for trained in both))

    def _run(self, model: nn.Module, parts: Sequence[Part], step: int) -> dict[str, torch.Tensor]:
        """Compute gradients into `.grad`; return them, buffers and losses by name.

        Buffers are afterwards as the first part has left them, for they follow rank 0.
        """
        buffers = list(model.buffers())
        before = [buffer.clone() for buffer in buffers]
        after: list[torch.Tensor] = []
        found: dict[str, torch.Tensor] = {}
        seen = [Outputs(is_on=self._keeps_outputs) for _ in parts]
        model.zero_grad()
        lowered = self._lowered if model is self.model else None
        for number, part in enumerate(parts):
            _set(buffers, before)
            seed_part(step, number)
            begun = states(self._device == "cuda")
            losses = []
            share = lowered.scale if lowered else 1 / len(parts)
            for piece in part.pieces:
                with lowered.weights() if lowered else nullcontext():
                    with seen[number].recording(model):
                        loss = self._loss_of(model, piece)
                    loss.backward(torch.full_like(loss, part.weight * share / len(part.pieces)))
                losses.append(loss.detach())
            self.draws |= not all(map(torch.equal, begun, states(self._device == "cuda")))
            if lowered is not None:
                lowered.take(len(parts))
            found[f"loss {number}"] = torch.stack(losses).mean()
            after = after or [buffer.clone() for buffer in buffers]
        _set(buffers, after)
        if self._keeps_outputs:
            self._seen.append(seen)
        if lowered is not None:
            lowered.put()
        found |= {name: p.grad for name, p in self._trained(model) if p.grad is not None}
        found |= dict(model.named_buffers())
        return {name: value.clone() for name, value in found.items()}

    def _run_double(self, step: int) -> dict[str, torch.Tensor]:
        assert self._double is not None
        try:
            with torch.autocast(self._device, enabled=False):
                return self._run(self._double, _in_double(self._parts), step)
        except Exception as error:
            # Code that is written for one dtype: a mask, a table, a `.float()` before a product.
            self.float64_failed = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            self._double = None
            return {}

    @torch.no_grad()
    def _in_one_piece(self) -> OnePiece | None:
        """Return the loss of pieces in one beside their mean; None of a batch that is not cut.

        In float64 where that can be, so that round-off hides nothing. Batch norm, whose statistics
        are a piece's on purpose, uses its running ones meanwhile.
        """
        parts = self._parts if self._double is None else _in_double(self._parts)
        pieces = [(p, part.weight / len(part.pieces)) for part in parts for p in part.pieces]
        if len(pieces) < 2:
            return None
        count, tried = len(pieces), pieces[:_PIECES]
        model = self.model if self._double is None else self._double
        low = self._lowered if self._double is None else None
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
        buffers = list(model.buffers())
        before = [buffer.clone() for buffer in buffers]
        for norm in norms:
            norm.eval()
        try:
            with (
                torch.enable_grad(),  # a loss may ask which of the outputs are trained
                torch.autocast(self._device, enabled=False) if low is None else nullcontext(),
                low.weights() if low is not None else nullcontext(),
            ):
                whole = float(self._loss_of(model, join([piece for piece, _ in tried])).detach())
                losses = [float(self._loss_of(model, piece).detach()) for piece, _ in tried]
        except Exception as error:
            return OnePiece(len(tried), count, failed=named(error).splitlines()[0])
        finally:
            _set(buffers, before)
            for norm in norms:
                norm.train()
        whole_weight = sum(weight for _, weight in tried)
        weighted = zip(losses, tried, strict=True)
        mean = sum(loss * weight for loss, (_, weight) in weighted) / whole_weight
        epsilon = self._epsilon if self._double is None else torch.finfo(torch.float64).eps
        allowed = math.sqrt(epsilon) * max(map(abs, losses))
        return OnePiece(len(tried), count, whole, mean, allowed)

    def _in_float64(self) -> nn.Module | None:
        dtypes = {p.dtype for p in self.model.parameters()}
        if dtypes == {torch.float64}:
            return None
        return copy.deepcopy(self.model).double()

    @contextmanager
    def _moved(self) -> Iterator[None]:
        """Move weights by half a unit of their last place, up or down at random."""
        own = [p for p in self.model.parameters() if not torch_quantized.is_quantized(p)]
        trained = [p for p in own if p.is_floating_point()]
        tensors = [*trained, *self.model.buffers()]
        kept = [tensor.detach().clone() for tensor in tensors]
        with torch.no_grad():
            for parameter in trained:
                signs = torch.randint(0, 2, parameter.shape, generator=self._random) - 0.5
                half = self._unit(parameter) * signs.to(parameter)
                parameter.add_(parameter * half)
        try:
            yield
        finally:
            _set(tensors, kept)

    def _unit(self, parameter: nn.Parameter) -> float:
        """Return the relative size of a last place: that of low precision if there is no other."""
        own = float(torch.finfo(parameter.dtype).eps)
        alone = self._lowered is not None and self._double is None
        return max(own, self._lowered.epsilon) if alone and self._lowered else own

    @property
    def _device(self) -> str:
        return next(self.model.parameters()).device.type

    @staticmethod
    def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _refuse_infinite(found: Mapping[str, torch.Tensor]) -> None:
    """Refuse numbers that are not finite.

    Raises:
        LayoutError: Names the first.
    """
    for name, value in found.items():
        if not bool(value.isfinite().all()):
            what = "a loss" if name.startswith("loss ") else f"the gradient or value of {name}"
            raise LayoutError(
                f"In one process {what} is not finite, so there is nothing to compare with.",
                do="give a batch and weights with which the model trains",
            )


@torch.no_grad()
def _set(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _in_double(parts: Sequence[Part]) -> list[Part]:
    def double(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    return [Part(tree_map_only(torch.Tensor, double, p.pieces), p.weight) for p in parts]


def _noise(
    mine: Mapping[str, torch.Tensor], others: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, Noise]:
    """Return the distance of the others from the result, by tensor."""
    return {
        name: Noise(
            max(_distance(value, other[name]) for other in others if name in other),
            _largest(value),
        )
        for name, value in mine.items()
        if any(name in other for other in others)
    }


def _errors(
    mine: torch.Tensor, name: str, others: Sequence[Mapping[str, torch.Tensor]]
) -> torch.Tensor:
    """Return the largest distance of each element."""
    furthest = torch.zeros_like(mine)
    for other in others:
        if name in other:
            distance = (mine.double() - other[name].double()).abs().to(mine.dtype)
            furthest = torch.maximum(furthest, distance)
    return furthest


def _outputs_of(part: Outputs, others: Sequence[Outputs], *, with_errors: bool) -> SeenOutputs:
    seen = [other.tensors for other in others]
    # Others may have fewer: what a model does may depend on its numbers.
    known = [name for name in part.tensors if all(name in other for other in seen)]
    mine = {name: part.tensors[name] for name in known}
    errors = {n: _errors(t, n, seen) for n, t in mine.items()} if with_errors else {}
    return SeenOutputs(mine, _noise(mine, seen), errors, part.unkept)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return largest_distance(a, b) if a.numel() else 0.0


def largest_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return it; equal infinities and nans, as of a mask, have none."""
    by = (a.double() - b.double()).abs()
    is_same = (a == b) | (a.isnan() & b.isnan())
    return float(by.masked_fill(is_same, 0.0).max())


def _largest(a: torch.Tensor) -> float:
    finite = a.double().abs().nan_to_num(0.0, 0.0)
    return float(finite.max()) if a.numel() else 0.0
