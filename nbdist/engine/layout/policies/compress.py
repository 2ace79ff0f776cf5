"""Send less of the gradients over the `dp` axis: communication hooks of DDP's reducer.

Rounding halves the bytes. torch has such hooks; its bf16 one is refused on CPUs by its name, and
none of them adds back the rounding errors.

*Error feedback*: a rank's rounding error is added to its next gradient before that is
rounded, so that nothing is lost for good, only sent later.

In two levels (`Compress(between=...)`) a group of near ranks first sums up unrounded, and it is the
group's sum that is rounded, each rank's slice of it, and remembered for the next step.

PowerSGD is torch's (Vogels et al., 2019).

Source: Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., "Error Feedback
Fixes SignSGD", 2019.

Threads: hooks are called by autograd, on the main thread or one of its threads, one bucket at a
time; the copy at the end is made by a thread of the backend.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from nbdist.engine.compat import torch_modules
from nbdist.engine.layout.plan.cost import MIN_COMPRESSION
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.policies.efficiency import Compress, Precision
from nbdist.engine.layout.policies.precision import DTYPES
from nbdist.engine.layout.policies.two_levels import TwoLevels, done
from nbdist.shared.errors import LayoutError

if TYPE_CHECKING:
    Bucket = Any  # torch's types lack it
else:
    Bucket = dist.GradBucket  # DDP looks at a hook's annotations
Reducer = Any  # DDP's, or the `DryReducer` that stands for it


def check(policy: Compress, precision: Precision, shape: MeshShape) -> None:
    """Refuse layouts without a reducer, and those that compression would corrupt.

    Raises:
        LayoutError: Another layout than copies, or a precision that does not go with it.
    """
    if shape.is_cut:
        raise LayoutError(
            f'Compress needs copies of the model, and the layout is "{shape.name}".',
            why="it is a hook of DDP's reducer, and fsdp, tp and pp communicate without that",
            do='Precision("fp32", reduce="bf16") halves the bytes of gradients there',
        )
    if precision.reduce != "fp32":
        raise LayoutError(
            f'Compress("{policy.method}") and Precision(reduce="{precision.reduce}") both say how '
            "gradients are sent.",
            do="keep one of the two",
        )
    if precision.needs_scaler and (policy.error_feedback or policy.method == "powersgd"):
        raise LayoutError(
            'Compress with error feedback does not go with Precision("fp16").',
            why="what is left over of one step has that step's loss scale, and an overflow would "
            "stay in it for ever",
            do='Precision("bf16"), which needs no scale, or Compress("bf16", error_feedback=False)',
        )


def needs_one_bucket(policy: Compress | None, device_type: str) -> bool:
    """Return whether all gradients must be sent at once.

    PowerSGD calls collectives within gloo's threads: with two buckets ranks pair different ones.
    """
    return policy is not None and policy.method == "powersgd" and device_type == "cpu"


def apply(reducer: Reducer, policy: Compress, levels: TwoLevels | None = None) -> None:
    """Have a reducer send less, from its next backward on.

    With levels, less between groups.
    """
    if policy.method != "powersgd":
        round_to(reducer, policy.method, error_feedback=policy.error_feedback, levels=levels)
        return
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=policy.rank,
        start_powerSGD_iter=policy.start,
        min_compression_rate=MIN_COMPRESSION,
        use_error_feedback=policy.error_feedback,
    )
    reducer.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def round_to(
    reducer: Reducer,
    dtype: str,
    *,
    error_feedback: bool = False,
    levels: TwoLevels | None = None,
) -> None:
    """Have a reducer send gradients in `dtype`."""
    state = Rounding(DTYPES[dtype], list(reducer.parameters()), error_feedback, levels)
    reducer.register_comm_hook(state, rounded_between if levels else rounded_all_reduce)


@contextmanager
def switched(ddp: torch.nn.parallel.DistributedDataParallel, *, is_on: bool) -> Iterator[list[str]]:
    """Have hooks compress from their first step on, or send gradients as they are.

    Yields the names of unknown hooks, which run unchanged. The caller restores the state of
    hooks.
    """
    unknown = []
    with ExitStack() as stack:
        for hook, state in torch_modules.comm_hooks_of(ddp):
            if isinstance(state, Rounding):
                stack.callback(setattr, state, "is_on", state.is_on)
                state.is_on = is_on
            elif isinstance(state, powerSGD_hook.PowerSGDState):
                # Until this step it averages as it is.
                stack.callback(setattr, state, "start_powerSGD_iter", state.start_powerSGD_iter)
                state.start_powerSGD_iter = 0 if is_on else sys.maxsize
            else:
                unknown.append(getattr(hook, "__name__", type(hook).__name__))
        yield unknown


class Rounding:
    """The state of the hook: rounding errors, in the order of the reducer's buckets.

    `reset` goes back to the state at a boundary, so its tensors are replaced and never written
    into.

    Attributes:
        errors: By bucket, the unsent part of the last mean share; flat. In two levels, of this
            rank's slice.
        is_on: False sends shares as they are.
        orders: By bucket, the places of its parameters in `parameters`.
        loose: By place, parts that no longer belong to a bucket: the reducer rebuilds its buckets.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        parameters: list[nn.Parameter],
        use_error_feedback: bool,
        levels: TwoLevels | None = None,
    ) -> None:
        self.dtype = dtype
        self.parameters = parameters
        self.use_error_feedback = use_error_feedback
        self.levels = levels
        self.is_on = True
        self.errors: dict[int, torch.Tensor] = {}
        self.orders: dict[int, tuple[int, ...]] = {}
        self.loose: dict[int, torch.Tensor] = {}

    def round(self, share: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """Return the part of a share that is sent, and keep the rest."""
        if not self.is_on:
            return share
        if not self.use_error_feedback:
            return share.to(self.dtype)
        index, order = bucket.index(), self._order_of(bucket)
        if self.orders.get(index) != order:
            self._rebuild(index, order, share)
        due = share + self.errors[index]
        # fp16 ends at 65504: larger values are sent later, too.
        limit = torch.finfo(self.dtype).max
        sent = due.clamp(-limit, limit).to(self.dtype)
        self.errors[index] = due - sent
        return sent

    def _order_of(self, bucket: Bucket) -> tuple[int, ...]:
        places = {id(p): place for place, p in enumerate(self.parameters)}
        return tuple(places[id(p)] for p in bucket.parameters())

    def _rebuild(self, index: int, order: tuple[int, ...], like: torch.Tensor) -> None:
        for old, places in self.orders.items():
            sizes = [self.parameters[place].numel() for place in places]
            errors = self.errors[old]
            if self.levels is not None:
                # Slices have moved, so ranks inside exchange all of them: new buckets come to
                # all ranks in one step.
                errors = self.levels.gather(errors, sum(sizes))
            self.loose |= dict(zip(places, errors.split(sizes), strict=True))
        self.errors, self.orders = {}, {index: order}
        parts = [
            self.loose.pop(place, like.new_zeros(self.parameters[place].numel())) for place in order
        ]
        errors = torch.cat(parts)
        self.errors[index] = errors if self.levels is None else self.levels.own_part(errors)


def rounded_all_reduce(state: Rounding, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in the state's dtype; the sum is rounded too, where ranks add it up."""
    share = bucket.buffer().div_(dist.get_world_size())
    sent = state.round(share, bucket)
    work: Any = dist.all_reduce(sent, async_op=True)

    def spread(done: Any) -> torch.Tensor:
        averaged: torch.Tensor = bucket.buffer().copy_(done.value()[0])
        return averaged

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(spread)
    return future


def rounded_between(state: Rounding, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in two levels: unrounded inside groups, in the state's dtype between."""
    assert state.levels is not None
    whole = bucket.buffer().div_(dist.get_world_size())
    sent = state.round(state.levels.reduce(whole), bucket)
    state.levels.exchange(sent)
    # Gathered as rounded: nothing is lost by that, and it sends fewer bytes inside too.
    whole.copy_(state.levels.gather(sent, whole.numel()))
    return done(whole)
