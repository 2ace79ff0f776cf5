"""Reset what a fault interrupted inside torch's objects, so that the next step starts clean.

DDP's reducer, FSDP, pipelines and gradient scalers keep the state of the running iteration in
themselves; an exception in the middle of forward or backward leaves it half done, and the next
iteration would fail or, worse, add to it. The gradients of that iteration are lost, on every rank:
they are set to None, also those that only an optimizer knows (tensor parallel, a user's own
all-reduce).
"""

from collections.abc import Iterable

import torch
from torch import nn

from nbdist.engine.compat import (
    torch_live,
    torch_modules,
    torch_pipeline,
    torch_sharded,
)
from nbdist.engine.group import ddp_buckets, ddp_hook_state, rendezvous
from nbdist.engine.steps import step_state
from nbdist.engine.steps.followers.progress import Progress
from nbdist.shared.text import counted

_UNKNOWN = Progress()


def reset_state(progress: Progress = _UNKNOWN) -> list[str]:
    """Reset every live object that a fault may have left half done. All ranks, after `reform`.

    Main thread; runs no collective. A user's own wrappers are left as they are.

    Args:
        progress: How far this rank had come, as the fault found it.

    Returns:
        One line an object, such as `DDP(GPT): reducer reset, 28 gradients dropped`.

    Raises:
        ClusterError: A rank did not come to it in time.
        ReleasedError: `group.abort` was called meanwhile.
    """
    lines = []
    for kind in (_reset_ddp, _reset_fsdp2, _reset_fsdp1, _reset_pipelines):
        lines += kind()
    lines += _reset_scalers(progress)
    # The last: what is left belongs to no wrapper.
    return lines + _reset_optimizers()


def _reset_ddp() -> list[str]:
    """DDP, also the one that composable `replicate` keeps behind a module."""
    lines = []
    ddps = torch_modules.live_ddps()
    remade = ddp_buckets.here.settle(ddps, _tell_all)
    for ddp in ddps:
        # Composable `replicate` hands DDP the parameters of the user's module in a list.
        inner = type(ddp.module).__name__
        name = "replicate" if isinstance(ddp.module, nn.ParameterList) else f"DDP({inner})"
        how = "reducer re-created" if id(ddp) in remade else "reducer reset"
        done = [how, _drop_gradients(ddp.parameters()), *ddp_hook_state.here.restore(ddp)]
        lines.append(f"{name}: {', '.join(done)}")
    return lines


def _tell_all(topic: str, text: str) -> dict[int, str]:
    return rendezvous.exchange(topic, text, rendezvous.FORM_TIMEOUT_S)


def _reset_fsdp2() -> list[str]:
    """Modules under `fully_shard`, also on a mesh of two dimensions (HSDP)."""
    lines = []
    for module, state in torch_sharded.live_fsdp2_roots():
        torch_sharded.reset_fsdp2(state)
        # torch gives the module a class of its own, such as FSDPGPT.
        name = type(module).__name__.removeprefix("FSDP")
        dropped = _drop_gradients(module.parameters())
        lines.append(f"fully_shard({name}): iteration reset, {dropped}")
    return lines


def _reset_fsdp1() -> list[str]:
    """FullyShardedDataParallel: every module by itself, a line for each outermost one."""
    lines = []
    for module in torch_sharded.live_fsdp1():
        torch_sharded.reset_fsdp1(module)
        if module.check_is_root():
            name = type(module.module).__name__
            dropped = _drop_gradients(module.parameters())
            lines.append(f"FullyShardedDataParallel({name}): iteration reset, {dropped}")
    return lines


def _reset_pipelines() -> list[str]:
    """Schedules and stages of torch.distributed.pipelining."""
    schedules, stages = torch_pipeline.live_pipelines()
    for schedule in schedules:
        torch_pipeline.reset_schedule(schedule)
    lines = []
    for stage in stages:
        module = torch_pipeline.reset_stage(stage)
        dropped = _drop_gradients(module.parameters())
        lines.append(f"pipeline stage {stage.stage_index}: micro-batches discarded, {dropped}")
    return lines


def _reset_scalers(progress: Progress) -> list[str]:
    """GradScaler: between `unscale_` and `update` it refuses to unscale again.

    One that lacks its `update`, or may, keeps what this needs, so that it can be made by hand.
    """
    living = step_state.here().followers.living()
    due = {*progress.lacking, *progress.unknown}
    kept = {id(living[name]) for name in due if name in living}
    scalers = torch_live.here.live(torch.amp.GradScaler)
    reset = [torch_modules.reset_grad_scaler(one) for one in scalers if id(one) not in kept]
    return [f"GradScaler: {sum(reset)} reset, their scale kept"] if any(reset) else []


def _reset_optimizers() -> list[str]:
    """Gradients of parameters that no wrapper holds."""
    lines = []
    for optimizer in torch_live.here.live(torch.optim.Optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p.grad is not None for p in parameters):
            dropped = _drop_gradients(parameters)
            lines.append(f"{type(optimizer).__name__}: {dropped}")
    return lines


def _drop_gradients(parameters: Iterable[nn.Parameter]) -> str:
    """Set the gradients to None; returns how many there were, in words."""
    with_gradient = [p for p in parameters if p.grad is not None]
    for parameter in with_gradient:
        parameter.grad = None
    return f"{counted(len(with_gradient), 'gradient')} dropped"
