"""The one process of a proof: rank 0 computes on the parts of all ranks and sends the results.

Main thread, all ranks.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from nbdist.engine.layout.plan.blocks import find_blocks
from nbdist.engine.layout.policies import eight_bits
from nbdist.engine.layout.policies.efficiency import FULL
from nbdist.engine.layout.verify.loss_sync import checked
from nbdist.engine.layout.verify.low_precision import Lowered
from nbdist.engine.layout.verify.preconditions import SOURCE, Provable, Task
from nbdist.engine.layout.verify.reference import Part, Reference, SeenOutputs
from nbdist.engine.layout.verify.report import LossSpread, Noise, OnePiece
from nbdist.engine.layout.weights import full_tensors, meta_copy
from nbdist.engine.layout.weights.full_tensors import TensorFacts
from nbdist.shared.error_text import text_of
from nbdist.shared.errors import LayoutError


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """Rank 0's report to all ranks of a step in one process.

    Attributes:
        noise: By tensor.
        losses: By part.
        rate: Of the steps of SGD.
        scale: Of the loss.
        spread: Of the losses, computed several times.
        one_piece: The loss of the batch in one piece; None where it is not cut.
        exact: Losses by part in float64; none where it could not be used.
        draws: Whether the model draws random numbers, though nothing is dropped.
    """

    noise: Mapping[str, Noise] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    rate: float = 0.0
    scale: float = 1.0
    spread: LossSpread = LossSpread.ROUND_OFF
    one_piece: OnePiece | None = None
    exact: list[float] = field(default_factory=list)
    draws: bool = False


class Alone:
    """The plain model with the layout's weights, on rank 0; what it has computed, on all."""

    def __init__(
        self,
        layout: Provable,
        bare: nn.Module,
        places: Mapping[str, TensorFacts],
        task: Task,
        gathered: list[tuple[Any, float]],
        *,
        keeps_outputs: bool = False,
    ) -> None:
        """Collect the weights. Collective.

        Args:
            layout: The layout to prove.
            bare: Its model as it was, without weights.
            places: The tensors of the layout.
            task: The computation.
            gathered: On rank 0, the parts of the batch with their weights.
            keeps_outputs: Keep what modules return, too.
        """
        self._keeps_outputs = keeps_outputs
        self._layout = layout
        self._task = task
        self._gathered = gathered
        self._last = ReferenceStep()
        self._reference: Reference | None = None
        self.model = filled(layout, bare, places)

    @property
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Those of the last step, on rank 0."""
        return {} if self._reference is None else self._reference.gradients

    @property
    def errors(self) -> Mapping[str, torch.Tensor]:
        """Of those gradients in low precision, element by element, on rank 0."""
        return {} if self._reference is None else self._reference.errors

    def outputs(self) -> SeenOutputs:
        """Return those of this rank's part in the last step, on the CPU. Collective."""
        sent: list[Any] | None = None
        if self._reference is not None:
            parts = [tree_map_only(torch.Tensor, _on_cpu, one) for one in self._plain_outputs()]
            ranks = range(dist.get_world_size())
            sent = [parts[self._layout.shape.data_part(rank)[0]] for rank in ranks]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, sent, src=SOURCE)
        return SeenOutputs(*mine[0])

    def _plain_outputs(self) -> list[tuple[Any, ...]]:
        known = [] if self._reference is None else self._reference.outputs
        return [(one.tensors, one.noise, one.errors, one.unkept) for one in known]

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """As the last step has left them, on rank 0."""
        return {} if self.model is None else dict(self.model.named_buffers())

    @property
    def float64_failed(self) -> str:
        """Why there is no second computation in float64; "" where there is, and on other ranks."""
        return "" if self._reference is None else self._reference.float64_failed

    def move(self, rate: float) -> None:
        """Make a step of plain SGD."""
        if self._reference is not None:
            self._reference.move(rate)

    def follow(self) -> None:
        """Go on with the weights that an optimizer has left in the plain model."""
        if self._reference is not None:
            self._reference.follow()

    def step(self, step: int) -> ReferenceStep:
        """Compute a step on rank 0, and return its report on all ranks. Collective.

        Raises:
            LayoutError: It cannot be computed; on all ranks.
        """
        sent: list[Any] = [None]
        failed: Exception | None = None
        if self.model is not None:
            try:
                sent[0] = self._compute(step, self.model)
            except LayoutError as error:
                failed, sent[0] = error, (error.what, error.why, error.do)
            except Exception as error:
                failed = error
                sent[0] = (
                    "The plain model does not run in one process with this batch and loss.",
                    f"{type(error).__name__}: {(text_of(error).splitlines() or [''])[0]}",
                    "verify((x, y), loss_fn) calls loss_fn(model(x), y)",
                )
        dist.broadcast_object_list(sent, src=SOURCE)
        if not isinstance(sent[0], ReferenceStep):
            what, why, do = sent[0]
            raise LayoutError(what, why=why, do=do) from failed
        self._last = sent[0]
        return self._last

    def _compute(self, step: int, model: nn.Module) -> ReferenceStep:
        if self._reference is None:
            parts = [Part(self._task.cut(inputs), weight) for inputs, weight in self._gathered]
            loss_fn = checked(self._task.loss_fn)
            self._reference = Reference(
                model,
                lambda plain, inputs: self._task.alone(plain, inputs, loss_fn),
                parts,
                lambda plain: lowered(self._layout, plain),
                keeps_outputs=self._keeps_outputs,
            )
        scaler = self._layout.scaler
        noise = self._reference.step(step, scaler.get_scale() if scaler.is_enabled() else 1.0)
        rate = self._last.rate or self._reference.pace()
        reference = self._reference
        return ReferenceStep(
            noise,
            reference.losses,
            rate,
            reference.scale,
            reference.spread,
            reference.one_piece,
            reference.exact,
            reference.draws,
        )


def filled(
    layout: Provable, bare: nn.Module, places: Mapping[str, TensorFacts]
) -> nn.Module | None:
    """Return, on rank 0, the plain model with the layout's weights, modes and flags. Collective.

    Args:
        layout: How the live model is spread.
        bare: It as it was, without weights; stays as it is.
        places: The tensors of the layout.
    """
    plain = None
    if dist.get_rank() == SOURCE:
        plain = copy.deepcopy(bare)
        meta_copy.materialise(plain, layout.mesh.device_type)
        _copy_modes(layout.model, plain)
    empty = {} if plain is None else full_tensors.names(plain)
    for name, full in full_tensors.tensors(layout):
        if plain is not None and name in empty:
            full_tensors.put(empty[name], full)
            if places[name].is_trained != empty[name].requires_grad:
                empty[name].requires_grad_(places[name].is_trained)
    return plain


def lowered(layout: Provable, plain: nn.Module) -> Lowered | None:
    """Have a plain model compute in the layout's precision; None where that is its own."""
    if layout.policies.precision == FULL:
        return None
    # Those of the plain model: with pp a rank's layout has only a part of them.
    units = list(find_blocks(plain)) if layout.shape.fsdp > 1 else None
    layers = list(eight_bits.found(layout.model))
    return Lowered(plain, layout.policies.precision, units, layers, layout.mesh.device_type)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _copy_modes(live: nn.Module, plain: nn.Module) -> None:
    """Give the plain model the live one's modes: a part may be in evaluation on purpose."""
    modes = {name: module.training for name, module in live.named_modules()}
    for name, module in plain.named_modules():
        module.training = modes.get(name, live.training)
