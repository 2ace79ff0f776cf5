"""Training that one rank leaves a step behind, on purpose: what the ranks of a test run."""

import hashlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from nbdist.engine.averaging.diloco import DiLoCo
from nbdist.engine.averaging.local_sgd import LocalSGD
from nbdist.engine.data import make
from nbdist.engine.data.position import position, resume
from nbdist.engine.group import group
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.rank import components
from nbdist.engine.recovery import follow, recovery, send_tensors, wrapped_models
from nbdist.engine.recovery.snapshots import snapshot
from nbdist.engine.recovery.snapshots import snapshot_schedule as schedule
from nbdist.engine.steps import keep, step_state
from nbdist.shared.wire import CellStart, Repeat

WIDTH, BATCH = 16, 8

names: dict[str, Any] = {}  # the namespace of the rank's cells
reached: dict[str, int] = {}  # the newest step whose backward is over


class Boom(Exception):
    """The fault that a test wants."""


def build(kind: str) -> None:
    """Make what `train` uses; every rank draws random numbers of its own."""
    recovery.install()
    keep.here.look_in(lambda: names)
    torch.manual_seed(0)
    names.clear()
    names.update(_KINDS[kind]())
    names["step"] = 0
    reached.clear()
    torch.manual_seed(100 + dist.get_rank())
    step_state.begin_cell()


def _net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH)
    )


def _training(model: nn.Module, **more: Any) -> dict[str, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, **more}


def _ddp() -> dict[str, Any]:
    return _training(DDP(_net()))


def _laid_by_nbdist() -> dict[str, Any]:
    model = _net()
    parallelize(model, "ddp")
    return _training(model)


def _plain_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))


def _fsdp() -> dict[str, Any]:
    model = _plain_net()
    fully_shard(model[0])
    fully_shard(model)
    return _training(model)


def _tensor_parallel() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return _training(model)


def _pipeline() -> dict[str, Any]:
    from torch.distributed import pipelining

    place, n = dist.get_rank(), dist.get_world_size()
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    stage = pipelining.PipelineStage(part, place, n, torch.device("cpu"))
    pipe = pipelining.ScheduleGPipe(stage, n_microbatches=2, loss_fn=F.mse_loss)
    return _training(part, pipe=pipe)


def _zero() -> dict[str, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(_plain_net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    return {"model": model, "optimizer": optimizer}


def _apart(wrap: Callable[..., Any]) -> dict[str, Any]:
    made = _training(_net())
    return {**made, "optimizer": wrap(made["optimizer"], every=4)}


def _independent() -> dict[str, Any]:
    return _training(_net())


_KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "ddp": _ddp,
    "laid by nbdist": _laid_by_nbdist,
    "fsdp": _fsdp,
    "tensor parallel": _tensor_parallel,
    "pipeline": _pipeline,
    "zero": _zero,
    "LocalSGD": lambda: _apart(LocalSGD),
    "DiLoCo": lambda: _apart(DiLoCo),
    "independent": _independent,
}


def train(until: int, break_at: int = -1, breaker: int = 1, place: str = "step") -> int:
    """Train up to a step and return it; rank `breaker` raises in step `break_at`.

    In `place` "step" after its backward, and before its update; "after step" before the scheduler.
    """
    while names["step"] < until:
        is_here = names["step"] == break_at and dist.get_rank() == breaker
        try:
            _step(names["step"], place if is_here else "")
        except Exception as error:
            if isinstance(error, Boom):
                names["boom"] = True
            elif not group.was_released(error):
                raise
            return int(names["step"])
        names["step"] += 1
    return int(names["step"])


def _step(number: int, fault: str) -> None:
    part = 0 if "pipe" in names else dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * number + part)
    x, y = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
    names["optimizer"].zero_grad()
    _forward_and_backward(x, y)
    reached["backward"] = number
    if fault == "step":
        raise Boom
    names["optimizer"].step()
    if fault == "after step":
        raise Boom
    if "scheduler" in names:
        names["scheduler"].step()


def _forward_and_backward(x: Tensor, y: Tensor) -> None:
    if "pipe" not in names:
        F.mse_loss(names["model"](x), y).backward()
    elif dist.get_rank() == 0:
        names["pipe"].step(x)
    else:
        names["pipe"].step(target=y)


def steps() -> int:
    """Return how many steps the optimizer has made, by our count."""
    return step_state.here().steps[names["optimizer"]].whole


def has_ended_backward(number: int) -> bool:
    """Return whether this rank has ended a step's backward: it has all that ranks give it there."""
    return reached.get("backward", -1) >= number


def recover(generation: int, replacements: list[int] | None = None) -> list[str]:
    """Recover; the loop's own counter follows the optimizer's."""
    agreed: list[str] = recovery.recover(generation, replacements or [])["agreed"]
    names["step"] = steps()
    return agreed


def fingerprint() -> str:
    """Return a hash of parameters, buffers, optimizer state, schedule and random numbers."""
    digest = hashlib.sha1()
    optimizer = names["optimizer"]
    optimizer = getattr(optimizer, "optim", optimizer)
    tensors: list[Tensor] = [*names["model"].parameters(), *names["model"].buffers()]
    if isinstance(names["optimizer"], DiLoCo):
        own = names["optimizer"].own_state()
        tensors += own["anchors"] + own["momenta"]
    for group_ in optimizer.param_groups:
        for parameter in group_["params"]:
            state = optimizer.state.get(parameter, {})
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(local.detach().clone().numpy().tobytes())
    digest.update(repr([g["lr"] for g in optimizer.param_groups]).encode())
    digest.update(torch.get_rng_state().numpy().tobytes())
    return digest.hexdigest()


def parameters() -> list[float]:
    """Return all parameters of the model, one after the other."""
    return [float(v) for p in names["model"].parameters() for v in p.detach().flatten()]


def forward_error() -> str:
    """Return what the model's next forward raises."""
    try:
        names["model"](torch.zeros(BATCH, WIDTH))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def without_snapshots() -> None:
    """Let snapshots find no memory."""
    snapshot.here._free_bytes = lambda: 0


def schedule_snapshots(interval_s: float) -> None:
    """Let snapshots follow each other after this time, whatever share of it they take.

    Ranks look for the next one at each step, and so none can miss it.
    """
    schedule.INTERVAL_S, schedule.TIME_SHARE, schedule.POLL_S = interval_s, 1.0, 0.0


def snapshots_held() -> list[int]:
    """Return the steps of the snapshots that this rank holds, newest first."""
    (unit,) = wrapped_models.find()
    return [of_optimizer for (of_optimizer, *_), _ in snapshot.here.held(unit)]


def interrupt_in_a_step(times: int, seconds: float = 0.0) -> dict[str, Any]:
    """Interrupt this rank in the midst of an optimizer's step, which then takes a while."""

    class Halves(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            first, second = self.param_groups[0]["params"]
            first.data.add_(1)
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(seconds)
            second.data.add_(1)

    recovery.install()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    optimizer = Halves([nn.Parameter(torch.zeros(1)) for _ in range(2)], lr=1.0)
    step_state.begin_cell()
    ended = "well"
    try:
        optimizer.step()
        time.sleep(5)
    except KeyboardInterrupt:
        ended = "interrupted"
    steps = step_state.here().steps[optimizer]
    strikes = False
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(3):
            time.sleep(0)
    except KeyboardInterrupt:
        strikes = True
    return {
        "ended": ended,
        "parameters": [p.item() for p in optimizer.param_groups[0]["params"]],
        "is torn": steps.is_torn(optimizer),
        "strikes between steps": strikes,
    }


def snapshot_status() -> dict[str, Any] | None:
    """Return what `%dist status` shows of snapshots."""
    return snapshot.here.status()


def fingerprint_of_model() -> str:
    """Return a hash of the model's parameters alone."""
    digest = hashlib.sha1()
    for parameter in names["model"].parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def break_the_next_copy() -> None:
    """Let rank 1 fail as it begins to copy."""
    native = send_tensors.receive

    def receive(rank: int) -> Any:
        send_tensors.receive = native
        raise Boom

    if dist.get_rank() == 1:
        send_tensors.receive = receive


def break_what_follows() -> None:
    """Let rank 1 fail when models stand at one step, before it hears what follows elsewhere."""
    native = follow.settle

    def fail(*_: object) -> Any:
        follow.settle = native
        raise Boom

    broken: Any = fail
    if dist.get_rank() == 1:
        follow.settle = broken


def recover_or_not(generation: int) -> str:
    """Recover; returns how that ended."""
    try:
        recover(generation)
    except Boom:
        return "Boom"
    except Exception as error:
        if not group.was_released(error):
            raise
        return "released"
    return "recovered"


# ---- A cell that loops over a loader -----------------------------------------------------------


def begin_cell(number: int, failed: int | None = None, again: bool = False) -> None:
    """Begin a cell, as the rank's program does; it may be empty."""
    repeat = Repeat.RETRY if again else Repeat.NO
    start = CellStart(number, (0, 1), number, failed=failed, repeat=repeat)
    components.begin((position.here, resume.here), start)
    step_state.begin_cell()


def run_empty_cell(number: int, failed: int | None) -> None:
    """Run a cell that does nothing."""
    begin_cell(number, failed)
    step_state.end_cell(is_failed=False)


def run_loader_cell(
    epochs: int,
    break_at: int,
    place: str = "before backward",
    number: int = 1,
    failed: int | None = None,
    again: bool = False,
) -> dict[str, Any]:
    """Run a cell that trains over a loader it makes; rank 1 raises in its step `break_at`.

    Args:
        epochs: How many.
        break_at: From 0; as many steps as there are raises after all of them, -1 never.
        place: Where in the step: "before backward" or "before step".
        number: The cell's.
        failed: The cell that failed last.
        again: This is that one.

    Returns:
        `trained` (the samples of each step that was made) and `parameters`, hashed.
    """
    begin_cell(number, failed, again)
    trained: list[list[int]] = []
    loader = names["loader"] = make.loader(range(60), global_batch=8, seed=3)
    try:
        next(iter(loader))  # a look
        for _ in range(epochs):
            for samples in loader:
                is_here = len(trained) == break_at and dist.get_rank() == 1
                x = samples.float().unsqueeze(1).repeat(1, WIDTH) / 60
                names["optimizer"].zero_grad()
                if is_here and place == "before backward":
                    raise Boom
                F.mse_loss(names["model"](x), x).backward()
                if is_here:
                    raise Boom
                names["optimizer"].step()
                trained.append(samples.tolist())
        if len(trained) == break_at and dist.get_rank() == 1:
            raise ValueError("after all steps")
        step_state.end_cell(is_failed=False)
    except Boom:
        group.abort()
    except ValueError:
        pass
    except Exception as error:
        if not group.was_released(error):
            raise
    return {"trained": trained, "parameters": fingerprint()}


def loader_position() -> list[int]:
    """Return epoch and samples consumed of the cell's loader, where its loop stood."""
    place = names["loader"].state_dict()
    return [place["epoch"], place["consumed"]]
