"""Ways to train on several ranks, each small enough to be broken in every place: what ranks run.

`build` makes one of `STRATEGIES`, `train` runs steps until a rank raises, `fingerprint` hashes what
came out. Hand-written torch objects stand beside what `nbdist.parallelize` lays.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_post_hook

from nbdist.engine.data.order.shards import data_shard
from nbdist.engine.group import ddp_hook_state, group
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.policies.efficiency import Compress
from nbdist.engine.layout.policies.policies import ContextParallel, Pipeline
from nbdist.engine.recovery import reset
from tests.group import models

WIDTH, BATCH, MICRO_BATCHES = 32, 8, 4
SMALL_BUCKET_MB = 0.004  # one layer a bucket: a fault finds some of them on their way


class Boom(Exception):
    """The fault that a test wants."""


# ---- Where the fault strikes -------------------------------------------------------------------


class Trip(nn.Module):
    """Passes its input on, and raises where it is armed, after so many passes."""

    armed = ""
    passes = 0  # let pass before it raises

    def forward(self, x: Tensor) -> Tensor:
        _trip("forward")
        return _TripBackward.apply(x)


class _TripBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _trip("backward")
        return gradient


def _trip(place: str) -> None:
    if Trip.armed != place:
        return
    if Trip.passes == 0:
        raise Boom(f"in {place}")
    Trip.passes -= 1


@contextmanager
def _armed(place: str, passes: int) -> Iterator[None]:
    Trip.armed, Trip.passes = place, passes
    try:
        yield
    finally:
        Trip.armed = ""


# ---- Models and data ---------------------------------------------------------------------------


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        if i == 1:
            layers.append(Trip())
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


class _WithUnused(nn.Module):
    """A model of which odd steps leave one branch out."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.branch = _mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return x + self.branch(x) if held.step % 2 == 0 else x


class _Checkpointed(nn.Module):
    """Computes its halves anew in backward."""

    def __init__(self) -> None:
        super().__init__()
        whole = _mlp()
        self.halves = nn.ModuleList([whole[:3], whole[3:]])

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        for half in self.halves:
            x = checkpoint(half, x, use_reentrant=False)
        return x


def _batch(step: int, part: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + part)
    x, y = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
    return x, y


# ---- One strategy at work ----------------------------------------------------------------------


@dataclass
class Training:
    """A model under a strategy, and how it makes a step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step_function: "Callable[[Training], None]"
    step: int = 0
    extra: dict[str, Any] = field(default_factory=dict)  # what must live as long as the model
    whole: Callable[[], Any] = nullcontext  # while it is open, parameters are not in shards


held: Training  # what a rank keeps from one posted function to the next


def build(strategy: str) -> None:
    """Make the model and optimizer that `train` uses."""
    global held
    _give_reset_back()
    _see_boundaries()
    held = STRATEGIES[strategy]()


@functools.cache
def _see_boundaries() -> None:
    """Note hooks' state and reducers at each boundary, as a rank does. Once a process."""
    register_optimizer_step_post_hook(lambda *_: ddp_hook_state.here.snapshot())


def train(
    until: int, break_at: int = -1, place: str = "", passes: int = 0, breaker: int = 1
) -> dict[str, Any]:
    """Train up to a step; rank `breaker` raises at `break_at`, in `place`.

    Args:
        until: Number of steps to have made.
        break_at: The step that fails; none by default.
        place: "before" a step, "forward", "backward", or "after backward" where there is such.
        passes: So many times the place is passed before it fails: micro-batches.
        breaker: The rank that fails.

    Returns:
        `step`, the one that was not ended, and `error`, "Boom", "released" or None.
    """
    while held.step < until:
        here = ""
        try:
            if held.step == break_at:
                # Nobody fails before all have ended the step before: one may else lose it.
                dist.barrier()
                here = place if dist.get_rank() == breaker else ""
            with _armed(here, passes):
                _trip("before")
                held.step_function(held)
        except Exception as error:
            if _is_boom(error):
                group.abort()
                return {"step": held.step, "error": "Boom"}
            if not group.was_released(error):
                raise
            return {"step": held.step, "error": "released"}
        held.step += 1
    return {"step": held.step, "error": None}


def _is_boom(error: BaseException | None) -> bool:
    # Pipelines raise an error of their own from it.
    return error is not None and (isinstance(error, Boom) or _is_boom(error.__cause__))


def recover(generation: int) -> list[str]:
    """Form the group anew and heal; returns what was healed."""
    group.reform(generation)
    return reset.reset_state()


def fingerprint() -> str:
    """Return a hash of all parameters of this rank, bit by bit."""
    digest = hashlib.sha1()
    with held.whole():
        for parameter in held.model.parameters():
            tensor = parameter.detach()
            if isinstance(tensor, DTensor):
                tensor = tensor.full_tensor()
            # A copy: numpy would keep FSDP from freeing the storage.
            digest.update(tensor.clone().numpy().tobytes())
    return digest.hexdigest()


def _plain_step(t: Training) -> None:
    x, y = _batch(t.step, dist.get_rank())
    F.mse_loss(t.model(x), y).backward()
    t.optimizer.step()
    # After the step, as many do: half-made gradients that a fault leaves would be added to.
    t.optimizer.zero_grad()


def _train_with_adam(model: nn.Module, **keep: Any) -> Training:
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-2), _plain_step, extra=keep)


# ---- Replicas ----------------------------------------------------------------------------------


def _ddp(**options: Any) -> Training:
    return _train_with_adam(DDP(_mlp(), bucket_cap_mb=SMALL_BUCKET_MB, **options))


def _ddp_by_nbdist() -> Training:
    model = _mlp()
    return _train_with_adam(model, layout=parallelize(model, "ddp"))


def _ddp_in_two_levels() -> Training:
    """Groups of two ranks, of which each knows what rounding has left out of its sum."""
    model = _mlp()
    policy = Compress("bf16", between=2)
    return _train_with_adam(model, layout=parallelize(model, "ddp", policy))


def _replicate() -> Training:
    from torch.distributed._composable.replicate import replicate

    model = _mlp()
    replicate(model, bucket_cap_mb=SMALL_BUCKET_MB)
    return _train_with_adam(model)


def _ddp_with_unused() -> Training:
    return _train_with_adam(
        DDP(_WithUnused(), bucket_cap_mb=SMALL_BUCKET_MB, find_unused_parameters=True)
    )


def _ddp_with_fp16() -> Training:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    training = _ddp()
    cast(DDP, training.model).register_comm_hook(None, default_hooks.fp16_compress_hook)
    return training


def _ddp_with_power_sgd() -> Training:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

    training = _train_with_adam(DDP(_mlp()))
    state = power_sgd.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)
    cast(DDP, training.model).register_comm_hook(state, power_sgd.powerSGD_hook)
    return training


def _ddp_on_new_group() -> Training:
    """Two replicas in each half of the world; the halves know nothing of each other."""
    first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
    mine = first if dist.get_rank() < 2 else second

    def step(t: Training) -> None:
        x, y = _batch(t.step, dist.get_rank())
        F.mse_loss(t.model(x), y).backward()
        dist.barrier()  # no half may end a step that the other loses
        t.optimizer.step()
        t.optimizer.zero_grad()

    training = _ddp(process_group=mine)
    training.step_function = step
    return training


def _ddp_on_mesh_dimension() -> Training:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

    def step(t: Training) -> None:
        x, y = _batch(t.step, dist.get_rank())
        F.mse_loss(t.model(x), y).backward()
        for parameter in t.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=mesh.get_group("outer"))
        t.optimizer.step()
        t.optimizer.zero_grad()

    training = _ddp(process_group=mesh.get_group("inner"))
    training.step_function = step
    return training


def _ddp_accumulating() -> Training:
    """Three micro-batches a step, of which the last one is synchronized."""

    def step(t: Training) -> None:
        assert isinstance(t.model, DDP)
        for micro in range(3):
            x, y = _batch(t.step, dist.get_rank() + 10 * micro)
            with t.model.no_sync() if micro < 2 else nullcontext():
                F.mse_loss(t.model(x), y).backward()
        t.optimizer.step()
        t.optimizer.zero_grad()

    training = _ddp()
    training.step_function = step
    return training


def _ddp_checkpointed() -> Training:
    return _train_with_adam(DDP(_Checkpointed(), bucket_cap_mb=SMALL_BUCKET_MB))


def _ddp_with_zero() -> Training:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(_mlp(), bucket_cap_mb=SMALL_BUCKET_MB)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    return Training(model, optimizer, _plain_step)


def _zero1_by_nbdist() -> Training:
    model = _mlp()
    layout = parallelize(model, "zero1")
    optimizer = layout.optimizer(torch.optim.Adam, lr=1e-2)
    return Training(model, optimizer, _plain_step, extra={"layout": layout})


def _ddp_with_scaler() -> Training:
    """The places also of a fault between `unscale_` and `update`: see "unscaled"."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def step(t: Training) -> None:
        x, y = _batch(t.step, dist.get_rank())
        scaler.scale(F.mse_loss(t.model(x), y)).backward()
        scaler.unscale_(t.optimizer)
        _trip("after backward")
        norm = nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
        dist.all_reduce(norm)  # as a program does that logs it
        scaler.step(t.optimizer)
        scaler.update()
        t.optimizer.zero_grad()

    training = _ddp()
    training.step_function = step
    training.extra.update(scaler=scaler)
    return training


def _ddp_compiled(optimize_ddp: bool) -> Training:
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = optimize_ddp
    training = _train_with_adam(DDP(_mlp()))
    compiled = torch.compile(training.model, backend="aot_eager")

    def step(t: Training) -> None:
        x, y = _batch(t.step, dist.get_rank())
        F.mse_loss(compiled(x), y).backward()
        t.optimizer.step()
        t.optimizer.zero_grad()

    training.step_function = step
    return training


# ---- Shards ------------------------------------------------------------------------------------


def _shard(mesh: DeviceMesh | None = None) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = _mlp()
    for layer in list(model.children()):
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _fsdp() -> Training:
    return _train_with_adam(_shard())


def _fsdp_without_torchs_reset() -> Training:
    """As with torch 2.11, which has no reset of its own."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    if hasattr(FSDPState, "_reset_iter_state"):
        _taken.append(FSDPState._reset_iter_state)
        del FSDPState._reset_iter_state
    return _fsdp()


_taken: list[Any] = []
_RESET = "_reset_iter_state"


def _give_reset_back() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    if _taken:
        setattr(FSDPState, _RESET, _taken.pop())


def _hsdp() -> Training:
    return _train_with_adam(_shard(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))))


def _hsdp_by_nbdist() -> Training:
    model = _mlp()
    return _train_with_adam(model, layout=parallelize(model, "dp=2 fsdp=2"))


def _fsdp_accumulating_and_clipping() -> Training:
    """Two micro-batches a step, the first unsynchronized, and a norm over all shards."""

    def step(t: Training) -> None:
        for micro in range(2):
            x, y = _batch(t.step, dist.get_rank() + 10 * micro)
            models.synchronize(t.model, micro == 1)
            F.mse_loss(t.model(x), y).backward()
        nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
        t.optimizer.step()
        t.optimizer.zero_grad()

    training = _fsdp()
    training.step_function = step
    return training


def _fsdp1(**options: Any) -> Training:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FSDP(
        _mlp(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=torch.device("cpu"),
        **options,
    )
    training = _train_with_adam(model)
    training.whole = lambda: FSDP.summon_full_params(model)
    return training


def _tensor_parallel_by_nbdist(layout: str) -> Training:
    def step(t: Training) -> None:
        x, y = _batch(t.step, data_shard().index)
        F.mse_loss(t.model(x), y).backward()
        dist.barrier()  # so that ranks agree about the step; a rank alone may end it
        t.optimizer.step()
        t.optimizer.zero_grad()

    model = _mlp()
    training = _train_with_adam(model, layout=parallelize(model, layout))
    training.step_function = step
    return training


class _Attending(nn.Module):
    """A block for context parallel, which can be made to raise."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), _mlp()

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (h.unflatten(-1, (4, -1)).transpose(1, 2) for h in self.qkv(x_BTD).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x_BTD + self.out(mixed.transpose(1, 2).flatten(2))


def _context_parallel(layout: str, method: str) -> Training:
    """Ranks exchange heads or keys in forward and in backward, around where one of them raises."""

    def step(t: Training) -> None:
        generator = torch.Generator().manual_seed(1000 * t.step + data_shard().index)
        x_BTD, y = (torch.randn(2, 8, WIDTH, generator=generator) for _ in range(2))
        F.mse_loss(t.model(x_BTD), y).backward()
        t.optimizer.step()
        t.optimizer.zero_grad()

    torch.manual_seed(0)
    model = nn.Sequential(_Attending(), _Attending())
    policy = ContextParallel(method, example=torch.zeros(2, 8, WIDTH))
    training = _train_with_adam(model, layout=parallelize(model, layout, policy))
    training.step_function = step
    return training


# ---- Tensor and pipeline parallel --------------------------------------------------------------


def _tensor_parallel() -> Training:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = _mlp()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    plan |= {"5": ColwiseParallel(), "7": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)

    def step(t: Training) -> None:
        x, y = _batch(t.step, 0)
        F.mse_loss(t.model(x), y).backward()
        dist.barrier()  # so that ranks agree about the step; a rank alone may end it
        t.optimizer.step()
        t.optimizer.zero_grad()

    # The last layer is not in the plan: parameters of two kinds.
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    return Training(model, optimizer, step)


def _pipeline(schedule: str) -> Training:
    """Two stages in each half of the world, each half a pipeline of its own."""
    from torch.distributed import pipelining

    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    here = halves[dist.get_rank() // 2]
    place = dist.get_rank(here)
    layers = list(_mlp())
    part = nn.Sequential(*layers[:3]) if place == 0 else nn.Sequential(Trip(), *layers[5:])
    stage = pipelining.PipelineStage(part, place, 2, torch.device("cpu"), group=here)
    make = getattr(pipelining, schedule)
    pipe = make(stage, n_microbatches=MICRO_BATCHES, loss_fn=F.mse_loss)

    def step(t: Training) -> None:
        x, y = _batch(t.step, dist.get_rank() // 2)
        if place == 0:
            pipe.step(x)
        else:
            pipe.step(target=y)
        dist.barrier()  # so that ranks agree about the step: the first stage may end it alone
        t.optimizer.step()
        t.optimizer.zero_grad()

    optimizer = torch.optim.Adam(part.parameters(), lr=1e-2)
    return Training(part, optimizer, step, extra={"pipe": pipe})


def _pipeline_by_nbdist(layout: str, *first_blocks: str, schedule: str = "1f1b") -> Training:
    """Rank 1 has the module that raises. No barrier: a step ends on all ranks or on none."""

    def step(t: Training) -> None:
        x, y = _batch(t.step, data_shard().index)
        t.extra["layout"].step(x, y, F.mse_loss)
        t.optimizer.step()
        t.optimizer.zero_grad()

    model = _mlp()
    policy = Pipeline(schedule, MICRO_BATCHES, split=first_blocks)
    training = _train_with_adam(model, layout=parallelize(model, layout, policy))
    training.step_function = step
    return training


STRATEGIES: dict[str, Callable[[], Training]] = {
    'nbdist.parallelize(model, "ddp")': _ddp_by_nbdist,
    "replicate": _replicate,
    "DDP": _ddp,
    "DDP, static_graph": lambda: _ddp(static_graph=True),
    "DDP, find_unused_parameters": _ddp_with_unused,
    "DDP, gradient_as_bucket_view": lambda: _ddp(gradient_as_bucket_view=True),
    "DDP, fp16_compress_hook": _ddp_with_fp16,
    "DDP on a new_group": _ddp_on_new_group,
    "DDP on a dimension of a DeviceMesh": _ddp_on_mesh_dimension,
    "DDP, no_sync": _ddp_accumulating,
    "DDP, activation checkpointing": _ddp_checkpointed,
    "DDP, GradScaler, clip_grad_norm_": _ddp_with_scaler,
    "DDP, ZeroRedundancyOptimizer": _ddp_with_zero,
    'nbdist.parallelize(model, "zero1")': _zero1_by_nbdist,
    "fully_shard": _fsdp,
    "fully_shard, our own reset": _fsdp_without_torchs_reset,
    "fully_shard, accumulation, clip_grad_norm_": _fsdp_accumulating_and_clipping,
    "fully_shard on a 2x2 mesh (HSDP)": _hsdp,
    'nbdist.parallelize(model, "dp=2 fsdp=2")': _hsdp_by_nbdist,
    "DDP, PowerSGD": _ddp_with_power_sgd,
    'nbdist.parallelize(model, "ddp", Compress("bf16", between=2))': _ddp_in_two_levels,
    "DDP, torch.compile, optimize_ddp=False": lambda: _ddp_compiled(False),
    "DDP, torch.compile": lambda: _ddp_compiled(True),
    "tensor parallel": _tensor_parallel,
    'nbdist.parallelize(model, "dp=2 tp=2")': lambda: _tensor_parallel_by_nbdist("dp=2 tp=2"),
    'nbdist.parallelize(model, "fsdp=2 tp=2")': lambda: _tensor_parallel_by_nbdist("fsdp=2 tp=2"),
    'nbdist.parallelize(model, "dp=2 cp=2")': lambda: _context_parallel("dp=2 cp=2", "ulysses"),
    'nbdist.parallelize(model, "fsdp=2 cp=2")': lambda: _context_parallel("fsdp=2 cp=2", "gather"),
    "pipeline, GPipe": lambda: _pipeline("ScheduleGPipe"),
    "pipeline, 1F1B": lambda: _pipeline("Schedule1F1B"),
    'nbdist.parallelize(model, "pp=4")': lambda: _pipeline_by_nbdist("pp=4", "0", "2", "5", "7"),
    'nbdist.parallelize(model, "pp=2 dp=2")': lambda: _pipeline_by_nbdist("pp=2 dp=2", "0", "5"),
    'nbdist.parallelize(model, "pp=2 fsdp=2")': lambda: _pipeline_by_nbdist(
        "pp=2 fsdp=2", "0", "5"
    ),
    'nbdist.parallelize(model, "pp=2 dp=2", Pipeline("zbv"))': lambda: _pipeline_by_nbdist(
        "pp=2 dp=2", "0", "5", "7", "9", schedule="zbv"
    ),
    "FullyShardedDataParallel": _fsdp1,
    "FullyShardedDataParallel, use_orig_params": lambda: _fsdp1(use_orig_params=True),
}
