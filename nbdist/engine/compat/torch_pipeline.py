"""Private parts of torch inside pipelines: what stages and schedules keep of a step.

One of the modules that hold what nbdist uses of torch's private parts; see `torch_groups.py`.
`check()` says what broke when a version moves. Tried with torch 2.11.0, 2.13.0 and 2.15.0 (CPU).
"""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.compat import heap
from nbdist.engine.compat.groups.torch_groups import ranks_of
from nbdist.engine.compat.lacking import lacking

# A schedule's flags for "my stages know what they send and receive", by kind of schedule.
_READY_FLAGS = (
    "_stage_forward_initialized",
    "_stage_backward_initialized",
    "_stages_forward_initialized",
    "_stages_backward_initialized",
)
_COPIES = "_nbdist_copies"
# What runs a micro-batch of a stage, whose number is the first argument.
_RUNS = {
    "forward_one_chunk": "F",
    "backward_one_chunk": "B",
    "backward_weight_one_chunk": "W",
}
# What a schedule of several stages a rank holds of the step that runs.
_UNDER_WAY = (
    "fwd_recv_ops",
    "bwd_recv_ops",
    "unshard_ops",
    "unsharded_stages",
    "backward_counter",
    "_deferred_stages",  # of torch 2.15, as the next
    "_finalized_stages",
)


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    return [f"torch {torch.__version__}: {what}" for what in _broken()]


def _broken() -> list[str]:
    from torch.distributed.pipelining import ScheduleGPipe, schedules, stage

    broken = lacking(stage, ["_PipelineStageBase"], "pipelining.stage")
    broken += lacking(schedules, ["_PipelineSchedule"], "pipelining.schedules")
    if not broken:
        broken += lacking(
            stage._PipelineStageBase, ["clear_runtime_states", *_RUNS], "pipelining's stage"
        )
    names = {name for kind in ScheduleGPipe.__mro__ for name in _names_in(kind)}
    if not names & set(_READY_FLAGS):
        broken.append("pipelining's schedule has other flags for stages that are set up")
    return broken


def _names_in(kind: type[Any]) -> tuple[str, ...]:
    constructor = vars(kind).get("__init__")
    return constructor.__code__.co_names if hasattr(constructor, "__code__") else ()


def live_pipelines() -> tuple[list[Any], list[Any]]:
    """Return the living schedules and stages.

    Found on the heap, and only where pipelining has been imported, which few programs do.
    """
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    if schedules is None or stages is None:
        return [], []
    return heap.living(schedules._PipelineSchedule), heap.living(stages._PipelineStageBase)


def note_copies(parameter: nn.Parameter, count: int) -> None:
    """Note that so many stages have a copy of a parameter each."""
    setattr(parameter, _COPIES, count)


def copies_of(parameter: nn.Parameter) -> int:
    """Return how many stages have a copy of it: 1, but for those of `note_copies`."""
    return int(getattr(parameter, _COPIES, 1))


def reset_stage(stage: Any) -> nn.Module:
    """Let a stage forget its micro-batches on their way; returns its module."""
    stage.clear_runtime_states()
    for name in ("bwd_cache", "backward_state", "dw_runner"):
        getattr(stage, name, {}).clear()
    for parts in (stage.args_recv_info, stage.grad_recv_info):
        for received in (one for of_part in parts.values() for one in of_part or ()):
            if hasattr(received, "take_buffer"):  # torch 2.15: each step allocates what it receives
                received.buffer = None
    module: nn.Module = stage.submod
    return module


def release_batch(schedule: Any) -> None:
    """Let go of what the stages hold of the batch that is over: torch does so in the next step."""
    for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
        stage.clear_runtime_states()


def reset_schedule(schedule: Any) -> None:
    """Let a schedule begin as in its first step.

    Its stages ask their neighbours once more what they will get: a fault in the first step may
    have left one rank with the answer and the other without.
    """
    schedule._internal_losses.clear()
    for name in _UNDER_WAY:
        getattr(schedule, name, {}).clear()
    for name in _READY_FLAGS:
        if hasattr(schedule, name):
            setattr(schedule, name, False)


# ---- What belongs to a layout -------------------------------------------------------------------

Ranks = tuple[int, ...]  # global


@dataclass(frozen=True, slots=True)
class _Laid:
    """Of which model a stage's module is a part, who trains it, and who has the same stages."""

    model: "ref[nn.Module]"
    ranks: Ranks
    replicas: tuple[Ranks, ...]


class LaidParts:
    """The modules of stages that layouts of a process have made of their models."""

    def __init__(self) -> None:
        self._laid: WeakKeyDictionary[nn.Module, _Laid] = WeakKeyDictionary()

    def __contains__(self, part: nn.Module) -> bool:
        return part in self._laid

    def remember_laid(
        self, part: nn.Module, model: nn.Module, ranks: Ranks, replicas: tuple[Ranks, ...] = ()
    ) -> None:
        """Know that a stage's module is a part of `model`, which these ranks train together.

        Args:
            part: The stage's module.
            model: The whole.
            ranks: Who trains it.
            replicas: Those of `ranks` that have the same stages, and equal weights, together.
        """
        self._laid[part] = _Laid(ref(model), ranks, replicas)

    def laid_models(self) -> dict[nn.Module, Ranks]:
        """Return the models of which this rank has stages, and the ranks that share them."""
        return {
            model: laid.ranks
            for laid in list(self._laid.values())
            if (model := laid.model()) is not None
        }

    def copies_of(self, model: nn.Module, rank: int) -> frozenset[int]:
        """Return the ranks that hold the same stages of a layout's model as `rank`."""
        sets = [
            its for laid in self._laid.values() if laid.model() is model for its in laid.replicas
        ]
        return next((frozenset(its) for its in sets if rank in its), frozenset())

    def hand_over(self) -> dict[str, tuple[nn.Module, nn.Module, Ranks, tuple[Ranks, ...]]]:
        """Return what a new rank must know of the stages that come with models."""
        known = enumerate(list(self._laid.items()))
        return {
            str(i): (part, model, laid.ranks, laid.replicas)
            for i, (part, laid) in known
            if (model := laid.model()) is not None
        }

    def take_over(
        self, known: dict[str, tuple[nn.Module, nn.Module, Ranks, tuple[Ranks, ...]]]
    ) -> None:
        """Know, on a new rank, what `hand_over` returned."""
        for part, model, ranks, replicas in known.values():
            if isinstance(part, nn.Module) and isinstance(model, nn.Module):
                self.remember_laid(part, model, ranks, replicas)


def live_parts() -> list[tuple[nn.Module, tuple[int, ...]]]:
    """Return the modules that pipelines train on this rank, and the global ranks that they are on.

    Of a layout that is its model, known from the start; of a program's own, a stage's module.
    """
    own = [stage for stage in live_pipelines()[1] if stage.submod not in here]
    world: Any = dist.group.WORLD
    return [*here.laid_models().items(), *((s.submod, ranks_of(s.group or world)) for s in own)]


# ---- Making what a layout runs -------------------------------------------------------------------

_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}

_FORWARDS = ("F", "SEND_F", "RECV_F", "WAIT_SEND_F")


def make_stage(
    module: nn.Module,
    index: int,
    count: int,
    device: torch.device,
    group: dist.ProcessGroup,
    *,
    inputs: tuple[torch.Tensor, ...],
    outputs: tuple[torch.Tensor, ...],
) -> Any:
    """Return a stage that knows its shapes, so that torch needs not run it to learn them."""
    from torch.distributed.pipelining import PipelineStage

    stage: Any = PipelineStage(
        module, index, count, device, input_args=inputs, output_args=outputs, group=group
    )
    if device.type == "cpu":
        # torch 2.11 begins with messages between neighbours, for NCCL to connect them. In a V a
        # rank is a neighbour of itself, and what it sends itself never arrives in gloo.
        stage._get_init_p2p_neighbors_ops = list
    if index == count - 1:
        # torch 2.11 checks what it returns: a loss, in a dtype that its function chooses.
        stage._validate_fwd_outputs = _accept
    return stage


def watch_micro_batches(
    stage: Any, timed: Callable[[str, int, Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Put `timed(kind, stage's number, function)` in the place of what runs a micro-batch."""
    for name, kind in _RUNS.items():
        setattr(stage, name, timed(kind, stage.stage_index, getattr(stage, name)))


def _accept(*_: object) -> None:
    """Check nothing."""


def make_schedule(
    name: str, stages: list[Any], microbatches: int, loss_fn: Callable[..., Any] | None
) -> Any:
    """Return a schedule of these stages of a rank; without a loss it runs forwards alone."""
    from torch.distributed import pipelining

    # It logs its whole plan where a stage raises; what was raised says more.
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    kind = getattr(pipelining, _SCHEDULES[name])
    of_rank = stages if len(stages) > 1 else stages[0]
    made = kind(of_rank, n_microbatches=microbatches, loss_fn=loss_fn, scale_grads=False)
    if loss_fn is None and len(stages) > 1:
        _leave_forwards(made)
    return made


def _leave_forwards(schedule: Any) -> None:
    """Take all but forwards out of a plan: torch's V shape fails in backwards that make nothing."""
    schedule.pipeline_order_with_comms = {
        rank: [action for action in actions if action.computation_type.value in _FORWARDS]
        for rank, actions in schedule.pipeline_order_with_comms.items()
    }


def raised_in_stage(error: RuntimeError) -> BaseException | None:
    """Return what a stage raised, where torch has put an error of its own around it."""
    text = str(error)
    is_torchs = "failed to run forward" in text or "Failed to run stage backward" in text
    return error.__cause__ if is_torchs else None


here = LaidParts()
