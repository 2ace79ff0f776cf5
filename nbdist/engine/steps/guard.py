"""Leave a step out on all ranks where a gradient of any of them is not finite.

It is looked for as the optimizer begins, after clipping; with a closure, after that. Where a number
is nan or infinite, all gradients are dropped: an optimizer passes over parameters without one, so
weights, momentum and weight decay stay as they were. Buffers go back to what they held as the step
began: batch norm's statistics would stay nan. The call is a step all the same: schedules and we
count it. Gradients that DDP has averaged are the same on all ranks, and so is what each decides;
where ranks hold parts of a model they agree by one all_reduce of 4 bytes. A model on one rank alone
is that rank's. On a GPU the host waits for the gradients once a step.

Source: `torch.amp.GradScaler`, which does it for fp16.

Threads: hooks run on the one that steps; all else on the main one.
"""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nbdist.engine.compat import torch_hooks, torch_live, torch_pipeline
from nbdist.engine.compat.cuda_graphs import graphs
from nbdist.engine.compat.torch_hooks import Closure, StepArgs, StepKeywords
from nbdist.engine.component import Component, EndedCell
from nbdist.engine.kernel.cost_clock import clocked
from nbdist.engine.steps import step_state
from nbdist.engine.steps.evidence import Evidence
from nbdist.engine.steps.left_out_steps import LeftOutSteps
from nbdist.shared.errors import UsageError
from nbdist.shared.text import counted
from nbdist.shared.wire import LEFT_OUT, CellStart

Optimizer = torch.optim.Optimizer

_LOOK = "%dist replay names the rank, the module and the sample."


class Guard(Component):
    """Which optimizers are watched, and the steps that were left out in the cell that runs.

    Attributes:
        step: Returns the step of the cell that the newest call of an optimizer belongs to; None
            where steps are not counted, or within another's call.
        log: Called with a step, None where it is not counted, and numbers.
        evidence: What is kept of the steps that were left out last.
    """

    def __init__(self) -> None:
        """Watch nothing."""
        self.step: Callable[[], int | None] = lambda: None
        self.log: Callable[[int | None, dict[str, float]], None] = lambda *_: None
        self.evidence = Evidence()
        self._is_on = False  # for each step of the cell
        self._armed: dict[int, ref[torch.Tensor]] = {}  # parameters, by `id`, for their next step
        self._is_armed = False  # also where a rank has no parameters
        self._dropped: WeakSet[Optimizer] = WeakSet()  # whose step is being made, without gradients
        self._left_out = LeftOutSteps()
        self._is_of_all = True
        self._reach: WeakKeyDictionary[Optimizer, _Reach] = WeakKeyDictionary()
        self._undo: list[torch_hooks.Undo] = []

    def cell_began(self, start: CellStart) -> None:
        """Watch all steps of a cell that asks for it."""
        self._uninstall()
        self._is_on = start.guard
        self._armed, self._is_armed, self._left_out = {}, False, LeftOutSteps()
        self._dropped.clear()
        optimizers = torch_live.here.live(Optimizer)
        self.evidence.begin_cell(
            start.number,
            watches_all=self._is_on,
            optimizers=optimizers,
            keeps_sound=self._is_on and bool(start.evidence),
        )
        if self._is_on:
            self._install()

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Tell of the steps that were left out."""
        self._uninstall()
        self.evidence.end_cell()
        notices = self.evidence.take_notices()
        if not self._left_out.steps:
            return notices
        by_itself = "" if self._is_of_all else f"on rank {dist.get_rank()}, which trains by itself"
        # One notice: of those that differ in numbers alone the notebook shows one rank's.
        said = "\n".join(self._left_out.sentences(by_itself or "on all ranks"))
        can_look = any(one.cell == cell.number for one in self.evidence.steps)
        return (*notices, said, _LOOK) if can_look else (*notices, said)

    def arm(self, parameters: Iterable[torch.Tensor], model: torch.nn.Module | None = None) -> None:
        """Watch the next step of the optimizers that have any of these parameters.

        Args:
            parameters: Those of a model.
            model: The one that is about to run, where it can run by itself again.
        """
        self.evidence.begin_guard()
        if model is not None:
            self.evidence.watch(model)
        self._armed |= {id(one): ref(one) for one in parameters}
        self._is_armed = True
        self._install()

    def leaves_out(self, optimizer: Optimizer) -> bool:
        """Return whether the step that an optimizer makes now is left out."""
        return optimizer in self._dropped

    def _install(self) -> None:
        # In the cell that asks, so behind the hooks of whoever counts its steps.
        if not self._undo:
            self._undo = [
                torch_hooks.before_plain_step(self._before_step),
                torch_hooks.on_optimizer_step(self._after_step),
            ]

    def _uninstall(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    def _before_step(
        self, optimizer: Optimizer, args: StepArgs, kwargs: StepKeywords
    ) -> tuple[StepArgs, StepKeywords] | None:
        parameters = _parameters(optimizer)
        if not self._watches(parameters):
            return None
        if graphs.is_capturing:
            raise UsageError(
                "A step that is captured in a CUDA graph cannot be left out.",
                why="whether its gradients are finite is decided on the host, which a replay does "
                "not ask.",
                do="leave out --guard and skip_nonfinite=True, or do not capture the optimizer.",
            )
        self._dropped.discard(optimizer)
        if (closure := torch_hooks.closure_of(args, kwargs)) is not None:
            return torch_hooks.with_closure(args, kwargs, self._guarded(optimizer, closure))
        self._look(optimizer, parameters, False)
        return None

    def _watches(self, parameters: list[torch.Tensor]) -> bool:
        if self._is_on or not self._is_armed:
            return self._is_on
        armed = (p for p in parameters if (known := self._armed.get(id(p))) and known() is p)
        # One without parameters, of a pipeline's stage, steps for what other ranks have.
        return not parameters or next(armed, None) is not None

    def _guarded(self, optimizer: Optimizer, closure: Closure) -> Closure:
        def look_after() -> Any:
            loss = closure()
            self._look(optimizer, _parameters(optimizer), True)
            return loss

        return look_after

    @clocked("guard")
    def _look(
        self, optimizer: Optimizer, parameters: list[torch.Tensor], has_closure: bool
    ) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms = norms_of(gradients)
        is_bad = not _are_finite(norms, gradients)
        if (reach := self._reach.get(optimizer)) is None:
            reach = self._reach[optimizer] = _Reach.of(parameters)
            self.evidence.note_made(optimizer)  # made before its model was wrapped, or named
        if reach.must_agree:
            is_bad = _any_rank(is_bad, gradients)
        if is_bad:
            self.evidence.keep(optimizer, parameters, is_of_all=reach.is_of_all)
            changed = self.evidence.changed_buffers(optimizer)
            step_state.here().put_buffers_back(optimizer, changed)
            for parameter in parameters:
                parameter.grad = None
            self._dropped.add(optimizer)
            self._is_of_all = reach.is_of_all
        else:
            self.evidence.keep_sound(
                optimizer,
                parameters,
                norms,
                is_of_all=reach.is_of_all,
                has_closure=has_closure,
            )

    def _after_step(self, optimizer: Optimizer, _args: StepArgs, _kwargs: StepKeywords) -> None:
        if self._is_armed:
            parameters = _parameters(optimizer)
            for parameter in parameters:
                self._armed.pop(id(parameter), None)
            self._is_armed = bool(parameters and self._armed)
        left_out, step = None, self.step()
        if optimizer in self._dropped:  # one within its step found no gradients
            self._dropped.discard(optimizer)
            left_out = self._left_out.note_left_out(step, _name(optimizer))
            if left_out is not None:
                self.log(step, {LEFT_OUT: float(len(self._left_out.steps))})
        elif step is not None and any(p.grad is not None for p in _parameters(optimizer)):
            self._left_out.note_stepped(step, _name(optimizer))
        is_left_out = left_out is not None
        self.evidence.stepped(optimizer, left_out if is_left_out else step, is_left_out=is_left_out)


def _name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__name__} ({counted(len(_parameters(optimizer)), 'parameter')})"


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class _Reach:
    """On how many ranks an optimizer's step is the same, and whether they must agree on it."""

    def __init__(self, *, must_agree: bool, is_of_all: bool) -> None:
        self.must_agree, self.is_of_all = must_agree, is_of_all

    @classmethod
    def of(cls, parameters: list[torch.Tensor]) -> "_Reach":
        """Return that of an optimizer with these parameters."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(must_agree=False, is_of_all=True)
        stages = torch_pipeline.live_pipelines()[1]
        staged = {id(p) for stage in stages for p in stage.submod.parameters()}
        is_cut = any(
            isinstance(p, DTensor) or torch_hooks.is_flat_shard(p) or id(p) in staged
            for p in parameters
        )
        if is_cut or (not parameters and staged):
            return cls(must_agree=True, is_of_all=True)
        own = {id(p) for p in parameters}
        ddps = torch_live.here.live(DistributedDataParallel)
        averaged = {id(p) for ddp in ddps for p in ddp.module.parameters()}
        return cls(must_agree=False, is_of_all=bool(own & averaged))


def is_finite(gradients: list[torch.Tensor]) -> bool:
    """Return whether all numbers are finite; of a DTensor this rank's. One wait for a GPU."""
    return _are_finite(norms_of(gradients), gradients)


def _values_of(gradient: torch.Tensor) -> torch.Tensor:
    local = torch_hooks.local_part(gradient.detach())
    return local._values() if local.is_sparse else local


def norms_of(gradients: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the norm of each, of a DTensor this rank's; None where there are none."""
    if not gradients:
        return None
    norms = torch._foreach_norm([_values_of(one) for one in gradients])
    return torch.stack([norm.to(norms[0].device) for norm in norms])


def _are_finite(norms: torch.Tensor | None, gradients: list[torch.Tensor]) -> bool:
    # A norm reads fast what it may overflow on: only then each number is looked at.
    if norms is None or bool(torch.isfinite(norms).all()):
        return True
    return all(bool(torch.isfinite(_values_of(one)).all()) for one in gradients)


def _any_rank(is_bad: bool, gradients: list[torch.Tensor]) -> bool:
    """Return whether it is so on any rank. Collective."""
    device = gradients[0].device if gradients else _device()
    flag = torch.tensor([is_bad], dtype=torch.float32, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


here = Guard()
