"""Run a pipeline's steps: micro-batches through the stages of all ranks, by torch's schedules.

What a stage is called with by a schedule is what the one before it sends (`alive`), and the number
of a micro-batch; the inputs and targets are here, whole, on every rank of a pipeline. Stages know
the shapes that they send and receive from a forward of the skeleton on fake tensors, once for each
new shape of a batch: torch's own way runs the real stage for it, which changes the running
statistics of norms.

Schedules make gradients; only the last stage has a loss.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from nbdist.engine.compat import torch_pipeline
from nbdist.engine.layout.axes.cp.context import check_length
from nbdist.engine.layout.axes.pp import stage_times, stage_trace, stages
from nbdist.engine.layout.axes.pp.alive import Crossing, TensorSpec
from nbdist.engine.layout.axes.pp.pipeline import StagePlan
from nbdist.engine.layout.axes.pp.stage_forward import StageForward, is_chain
from nbdist.engine.layout.axes.pp.stage_trace import ForwardTrace
from nbdist.engine.layout.axes.pp.stages import Stage
from nbdist.engine.layout.plan import numbers
from nbdist.engine.layout.plan.inputs import Inputs, samples_in, split
from nbdist.engine.layout.plan.trace import untouched
from nbdist.engine.training import training
from nbdist.shared.errors import LayoutError

LossFunction = Callable[[Any, Any], torch.Tensor]

_MAX_SCHEDULES = 4  # shapes of batches whose buffers are kept


@dataclass(slots=True)
class _Work:
    """The data of a step."""

    inputs: list[Inputs]
    targets: list[Any]
    loss_fn: LossFunction
    scale: float | torch.Tensor  # of each micro-batch's gradients
    seen: ForwardTrace  # of one micro-batch
    losses: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SequenceSlices:
    """The number of parts in which hidden states are sent: each rank of cp has its own pipeline.

    Attributes:
        count: Ranks of cp.
        dims: By block, which dim of its hidden state is the sequence; empty without cp.
    """

    count: int
    dims: dict[str, int]

    def of(self, seen: ForwardTrace) -> ForwardTrace:
        """Return what is sent, on one rank.

        Raises:
            LayoutError: A sequence cannot be cut, or more than a hidden state is sent.
        """
        if self.count == 1:
            return seen
        sent = {n: self._part(seen.blocks[n], *found) for n, found in seen.crossings.items()}
        return replace(seen, crossings=sent)

    def _part(self, name: str, hidden: Crossing, *others: Crossing) -> tuple[Crossing, ...]:
        if others or hidden.places or hidden.in_place:
            raise LayoutError(
                f"pp beside cp sends a hidden state alone, and more goes to {name}.",
                why="cp knows in which dim of a hidden state the sequence is, and of no others",
                do="leave out cp, or pp",
            )
        shape, dim = list(hidden.spec.shape), self.dims[name]
        shape[dim] = check_length(shape[dim], self.count)
        return (replace(hidden, spec=TensorSpec(torch.Size(shape), hidden.spec.dtype)),)


class ScheduleRunner:
    """The pipeline of one layout, on this rank.

    Attributes:
        plan: How the model is cut.
        rank: This rank's place on the axis pp.
        mine: Its stages.
        forward: Runs a part of the model's forward.
        device: Where the weights are.
    """

    def __init__(
        self,
        plan: StagePlan,
        forward: StageForward,
        skeleton: nn.Module,
        mesh: DeviceMesh,
        device: torch.device,
        in_parts: SequenceSlices,
        same: tuple[tuple[int, ...], ...],
    ) -> None:
        self.plan = plan
        self._in_parts = in_parts
        self.rank = mesh.get_local_rank()
        self.mine = plan.of_rank(self.rank)
        self.forward = forward
        self._skeleton = skeleton
        self._mesh = mesh
        self.device = device
        self._parts = [_Part(self, stage) for stage in self.mine]
        for part in self._parts:
            # All ranks: the averages of dp and fsdp belong to the step like the messages of pp.
            ranks = tuple(range(dist.get_world_size()))
            torch_pipeline.here.remember_laid(part, forward.model, ranks, same)
        self._schedules: dict[Any, tuple[Any, ForwardTrace]] = {}
        self._work: _Work | None = None
        self._largest = 0  # share that a step has taken, in samples
        has_batch_norm = any(isinstance(m, _BatchNorm) for m in skeleton.modules())
        self._least = 2 if has_batch_norm else 1  # samples of a micro-batch

    def __getstate__(self) -> dict[str, Any]:
        """Leave out schedules: a new rank makes its own in its first step."""
        return {**self.__dict__, "_schedules": {}, "_work": None}

    @property
    def model(self) -> nn.Module:
        """The model, of which this rank has a part."""
        return self.forward.model

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks of this pipeline."""
        return self._mesh.get_group()

    @property
    def has_loss(self) -> bool:
        """Whether this rank has the last stage."""
        return any(stage is self.plan.stages[-1] for stage in self.mine)

    def run(
        self, inputs: Inputs, y: Any, loss_fn: LossFunction, scale: float | torch.Tensor
    ) -> torch.Tensor | None:
        """Run a batch through all stages: forwards, and backwards where gradients are on.

        Args:
            inputs: The model's inputs, the same on all ranks of the pipeline.
            y: The targets: a tensor, or a tree of them.
            loss_fn: Makes the mean loss of one micro-batch.
            scale: Of the gradients, beside the mean over micro-batches.

        Returns:
            The mean loss, detached, on ranks with the last stage; None on others.

        Raises:
            LayoutError: The batch cannot be cut.
            Exception: Raised by a block or `loss_fn` on this rank.
        """
        trains = torch.is_grad_enabled()
        samples = inputs.samples
        count = self._count(samples, trains)
        parts = inputs.split(samples, count)
        schedule, seen = self._schedule(parts[0], count, trains)
        self._work = _Work(parts, split(y, samples, count), loss_fn, scale / count, seen)
        order = torch.arange(count)
        given = (order,) if any(stage.index == 0 for stage in self.mine) else ()
        try:
            schedule.step(*given, target=order, number=order)
            losses = self._work.losses
            stage_times.here.step_ended()
        except RuntimeError as error:
            cause = torch_pipeline.raised_in_stage(error)
            if cause is None:
                raise
            raise cause from None
        finally:
            self._work = None
            torch_pipeline.release_batch(schedule)
        return torch.stack(losses).mean() if losses else None

    def cut(self, batch: Any) -> list[Any]:
        """Return the micro-batches of a training step, each as a tree like `batch`."""
        samples = samples_in(batch)
        return split(batch, samples, self._count(samples, trains=True))

    def _count(self, samples: int, trains: bool) -> int:
        """Return the number of micro-batches; forwards without backwards take any batch."""
        policy, pp = self.plan.policy, self.plan.pp
        if trains:
            count = stages.count_for(samples, policy, pp, self._largest, self._least)
            self._largest = max(self._largest, samples)
            return count
        return stages.forward_microbatches(pp, policy.microbatches, samples)

    def _schedule(self, inputs: Inputs, count: int, trains: bool) -> tuple[Any, ForwardTrace]:
        is_training = self.forward.model.training
        key = (count, trains, is_training, repr(stage_trace.specs((inputs.args, inputs.keywords))))
        if key not in self._schedules:
            seen = self._in_parts.of(self.traced(inputs))
            while len(self._schedules) >= _MAX_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
            self._schedules[key] = (self._make(seen, count, trains), seen)
        return self._schedules[key]

    def traced(self, inputs: Inputs) -> ForwardTrace:
        """Return the record of a forward with inputs of these shapes, in the model's mode.

        Raises:
            LayoutError: It calls other blocks than those that were cut.
        """
        blocks = list(self.plan.trace.blocks)
        firsts = [stage.first for stage in self.plan.stages]
        with untouched(self._skeleton):
            self._skeleton.train(self.forward.model.training)
            seen = stage_trace.trace(
                self._skeleton, blocks, inputs, self.device, self.plan.imitation, firsts
            )
        if seen.blocks != self.plan.trace.blocks:
            raise LayoutError(
                "The model calls other blocks for this batch than for the one it was cut with.",
                do="give a batch like this as Pipeline(example=...)",
            )
        stages.refuse_cut(seen.blocks, seen.cannot)
        return seen

    def _make(self, seen: ForwardTrace, count: int, trains: bool) -> Any:
        last = len(self.plan.stages) - 1
        made = [
            torch_pipeline.make_stage(
                part,
                part.stage.index,
                last + 1,
                self.device,
                self.group,
                inputs=_sent(seen, part.stage.first) or (torch.zeros(1).long(),),
                outputs=_sent(seen, part.stage.end) or (torch.zeros(1),),
            )
            for part in self._parts
        ]
        if trains:
            for stage in made:
                torch_pipeline.watch_micro_batches(stage, stage_times.here.timed)
        schedule = self.plan.policy.schedule
        if not trains and len(made) == 1:
            schedule = "gpipe"  # forwards without backwards go one way, in any number
        return torch_pipeline.make_schedule(schedule, made, count, _own_loss if trains else None)

    def run_stage(self, stage: Stage, received: tuple[torch.Tensor, ...], number: int) -> Any:
        """Run a stage on a micro-batch; called by a schedule.

        Returns:
            A tuple of what is sent to the next stage, or the loss, of one element, its gradient
            scaled.
        """
        work = self._work
        assert work is not None, "schedules run within a step"
        inputs, seen = work.inputs[number], work.seen
        output = self.forward.run(stage.first, stage.end, inputs, seen, received)
        if stage is not self.plan.stages[-1]:
            sent = seen.crossings[stage.end]
            if stages.makes_halves(self.plan.policy.schedule) and not is_chain(sent):
                # They are detached in place, and this stage may use them, too.
                output = tuple(tensor.clone() for tensor in output)
            return as_specified(output, sent, stage)
        loss = _plain(work.loss_fn(output, work.targets[number]))
        work.losses.append(loss.detach())
        if torch.is_grad_enabled() and stages.makes_halves(self.plan.policy.schedule):
            training.here.note_loss(loss.detach())
        scaled: torch.Tensor = _Scaled.apply(loss.reshape(1), work.scale)  # type: ignore[no-untyped-call]
        return scaled


class _Part(nn.Module):
    """One stage as the module that torch's stages call; the model itself is no part of it.

    torch looks for wrappers among a stage's modules, and would take gradients away.
    """

    def __init__(self, runner: ScheduleRunner, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self._held = (runner,)  # in a tuple, where no module is looked for

    def forward(self, *given: torch.Tensor, number: torch.Tensor) -> Any:
        nth = int(number) if numbers.are_here() else 0  # in a dry world all have one shape
        return self._held[0].run_stage(self.stage, given if self.stage.index else (), nth)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield this stage's trained parameters."""
        model = self._held[0].model
        return (model.get_parameter(name) for name in self.stage.parameters)


class _Scaled(torch.autograd.Function):
    """Passes a loss on unchanged, and scales its gradient: the unscaled loss is recorded."""

    @staticmethod
    def forward(ctx: FunctionCtx, loss: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        ctx.scale = scale  # type: ignore[attr-defined]
        return loss.clone()  # no view: schedules detach it in place

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> Any:
        return gradient * ctx.scale, None  # type: ignore[attr-defined]


def _own_loss(loss: torch.Tensor, _number: object) -> torch.Tensor:
    """The last stage returns the loss: an output may be more than tensors."""
    return loss


def _plain(loss: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = loss.full_tensor() if isinstance(loss, DTensor) else loss
    return whole


def as_specified(
    sent: Sequence[Any], crossings: Sequence[Crossing], stage: Stage
) -> tuple[torch.Tensor, ...]:
    """Return tensors as the next stage expects them, in dtypes that hold them."""
    pairs = zip(sent, crossings, strict=True)
    return tuple(_as_specified(one, crossing.spec, stage) for one, crossing in pairs)


def _as_specified(hidden: Any, spec: TensorSpec, stage: Stage) -> torch.Tensor:
    if not isinstance(hidden, torch.Tensor) or hidden.shape != spec.shape:
        found = tuple(getattr(hidden, "shape", ()))
        raise LayoutError(
            f"Stage {stage.index} made {found} where {tuple(spec.shape)} was expected.",
            why="the shape depends on more than the shapes of the inputs",
            do='use "zero3" for such a model',
        )
    state = hidden.to(spec.dtype).contiguous()
    if state._is_view():
        state = state.clone()  # zero-bubble schedules detach it in place
    if torch.is_grad_enabled() and not state.requires_grad:
        return state.detach().requires_grad_()  # nothing is trained so far: a gradient may come
    return state


def _sent(seen: ForwardTrace, block: int) -> tuple[torch.Tensor, ...]:
    specs = (crossing.spec for crossing in seen.crossings.get(block, ()))
    return tuple(
        torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=True)
        for spec in specs
    )
