"""What the ranks run in test_heal."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.nn.parallel import DistributedDataParallel as DDP

from nbdist.engine.group import ddp_hook_state
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.recovery import reset
from tests.group import models
from tests.group.layout_ranks import difference, state_of

WIDTH = 32


def heal_half_made_step() -> list[str]:
    """Leave gradients in a DDP, a sharded and a plain module, and a scaler between two calls."""
    gc.collect()
    ddp, sharded, plain = DDP(_linear()), _linear(), _linear()
    fully_shard(sharded)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    modules: tuple[nn.Module, ...] = (ddp, sharded, plain)
    for module in modules:
        scaler.scale(module(torch.ones(1, WIDTH)).sum()).backward()
    scaler.unscale_(optimizer)
    lines = reset.reset_state()
    assert all(p.grad is None for module in modules for p in module.parameters())
    scaler.scale(plain(torch.ones(1, WIDTH)).sum()).backward()
    scaler.unscale_(optimizer)
    return lines


def steps_after_interrupts(layout: str) -> dict[str, float]:
    """Interrupt FSDP between parameters, heal, step: how far weights are from one process' then."""
    apart = {}
    for name in ("to_unsharded", "to_sharded"):
        for when in ("before", "after"):
            apart[f"{when} {name}"] = _step_after_interrupt(
                layout, name, is_before=when == "before"
            )
    return apart


def _step_after_interrupt(layout: str, name: str, *, is_before: bool) -> float:
    gc.collect()
    alone, spread = (models.make("gpt", torch.float64) for _ in range(2))
    laid = parallelize(spread, layout)
    optimizers = [
        torch.optim.SGD(alone.parameters(), lr=0.1),
        laid.optimizer(torch.optim.SGD, lr=0.1),
    ]
    for step in range(2):
        x, y = models.batch("gpt", step, 4, torch.float64)  # alike on all ranks
        if step == 1:
            try:
                with _interrupted(name, is_before=is_before):
                    models.loss_of("gpt", spread(x), y).backward()
            except KeyboardInterrupt:
                reset.reset_state()
            else:
                raise AssertionError("nothing was interrupted")
        for model, optimizer in zip((alone, spread), optimizers, strict=True):
            models.loss_of("gpt", model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return difference(state_of(alone), state_of(spread))


@contextmanager
def _interrupted(name: str, *, is_before: bool) -> Iterator[None]:
    """Raise at the fourth parameter that `name` is called of, before it or after it."""
    native, calls = getattr(FSDPParam, name), 0

    def method(param: FSDPParam) -> None:
        nonlocal calls
        calls += 1
        if calls == 4 and is_before:
            raise KeyboardInterrupt
        native(param)
        if calls == 4:
            raise KeyboardInterrupt

    setattr(FSDPParam, name, method)
    try:
        yield
    finally:
        setattr(FSDPParam, name, native)


def power_sgd_after_two_lost_steps() -> dict[str, Any]:
    """Lose a step twice after a boundary, and go back to it each time."""
    ddp = DDP(_linear())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(4):
        _backward(ddp, step)
    ddp_hook_state.here.snapshot()
    told: dict[str, Any] = {"noted": _contents(state), "restored": []}
    for step in (4, 5):
        _backward(ddp, step)
        told["lost"] = _contents(state)
        told["lines"] = ddp_hook_state.here.restore(ddp)
        told["restored"].append(_contents(state))
    return told


def hook_of_a_user() -> list[str]:
    """Restore a hook that keeps something nobody knows, beside one that keeps nothing."""
    world = dist.group.WORLD
    assert world is not None

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state["calls"] += 1
        return default_hooks.allreduce_hook(world, bucket)

    counting, stateless = DDP(_linear()), DDP(_linear())
    counting.register_comm_hook(Counter(), hook)
    stateless.register_comm_hook(world, default_hooks.allreduce_hook)
    return ddp_hook_state.here.restore(counting) + ddp_hook_state.here.restore(stateless)


def power_sgd_in_buckets() -> str:
    """Register PowerSGD on a module whose buckets are smaller than it."""
    ddp = DDP(_linear(), bucket_cap_mb=0.001)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    try:
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "no error"


def _linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH)


def _backward(ddp: DDP, step: int) -> None:
    torch.manual_seed(100 * step + dist.get_rank())
    ddp(torch.randn(4, WIDTH)).square().sum().backward()


def _contents(state: powerSGD_hook.PowerSGDState) -> str:
    """Return all that the hook goes on with, as text, bit by bit."""
    tensors = [*state.error_dict.items(), *state.q_memory_dict.items()]
    values = [(key, tensor.clone().numpy().tobytes().hex()) for key, tensor in tensors]
    return repr((values, state.iter, state.rng.get_state(legacy=False)["state"]["pos"]))
