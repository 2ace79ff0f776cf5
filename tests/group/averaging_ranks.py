"""What ranks run in test_averaging: training in rounds beside a simulation in one process."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from nbdist.engine.averaging.diloco import DiLoCo
from nbdist.engine.averaging.local_sgd import LocalSGD
from nbdist.engine.kernel.records import Recorder
from nbdist.engine.tap import tap
from nbdist.engine.training import training
from nbdist.shared.errors import LayoutError
from tests.group import models

STEPS, PART = 8, 2
F64 = torch.float64

Make = Callable[[Any], torch.optim.Optimizer]
Meet = Callable[[int, list[nn.Module]], None]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, name: str, step: int, rank: int, n: int) -> Tensor:
    x, y = models.batch(name, step, PART * n, F64)
    return models.loss_of(name, model(x[rank::n]), y[rank::n])


def train(
    model: nn.Module, opt: torch.optim.Optimizer, name: str = "gpt", steps: int = STEPS
) -> list[float]:
    """The user's loop, on this rank's part of each batch."""
    losses = []
    for step in range(steps):
        loss = loss_of(model, name, step, dist.get_rank(), dist.get_world_size())
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def simulate(n: int, make: Make, meet: Meet, name: str = "gpt", rank: int = 0) -> dict[str, Tensor]:
    """Train n workers one after the other in this process; `meet` is called after each step."""
    workers = [models.make(name, F64) for _ in range(n)]
    opts = [make(worker.parameters()) for worker in workers]
    for step in range(STEPS):
        for place, (worker, opt) in enumerate(zip(workers, opts, strict=True)):
            loss_of(worker, name, step, place, n).backward()
            opt.step()
            opt.zero_grad()
        meet(step + 1, workers)
    return dict(workers[rank].state_dict())


@torch.no_grad()
def equalise(workers: list[nn.Module]) -> None:
    """Give all workers the mean of their parameters and floating buffers."""
    for of_all in zip(*(worker.state_dict().values() for worker in workers), strict=True):
        if of_all[0].is_floating_point():
            mean = torch.stack(list(of_all)).mean(0)
            for one in of_all:
                one.copy_(mean)


def every(k: int) -> Meet:
    return lambda step, workers: equalise(workers) if step % k == 0 else None


class Outer:
    """DiLoCo's outer step, by torch's own SGD on a copy of the model."""

    def __init__(self, k: int, name: str = "gpt") -> None:
        self.k = k
        self.anchor = models.make(name, F64)
        self.opt = torch.optim.SGD(self.anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def __call__(self, step: int, workers: list[nn.Module]) -> None:
        if step % self.k:
            return
        for place, outer in enumerate(self.anchor.parameters()):
            theirs = [list(worker.parameters())[place].detach() for worker in workers]
            outer.grad = sum(outer.detach() - one for one in theirs) / len(workers)  # type: ignore[assignment]
        self.opt.step()
        for worker in workers:
            worker.load_state_dict(self.anchor.state_dict())


def difference(model: nn.Module, wanted: dict[str, Tensor]) -> float:
    state = model.state_dict()
    assert list(state) == list(wanted)
    return max(
        float((state[k] - wanted[k]).abs().max()) for k in state if state[k].is_floating_point()
    )


def by_ddp() -> tuple[list[float], dict[str, Tensor]]:
    model = models.make("gpt", F64)
    ddp = DDP(model)
    losses = train(ddp, sgd(model.parameters()))
    return losses, dict(model.state_dict())


def everything() -> dict[str, Any]:
    """Run all that two ranks are asked to, in one group."""
    functions = (oracles, bytes_sent, looks_like_an_optimizer, wrong_use)
    return {function.__name__: function() for function in functions}


def oracles() -> dict[str, float]:
    """Largest differences from DDP, where they must be round-off, and from simulations."""
    n, rank = dist.get_world_size(), dist.get_rank()
    found: dict[str, float] = {}
    losses, state = by_ddp()
    for name, wrap in (
        ("LocalSGD", lambda opt: LocalSGD(opt, every=1)),
        ("LocalSGD, warm-up", lambda opt: LocalSGD(opt, every=5, warmup_steps=STEPS)),
        ("DiLoCo", lambda opt: DiLoCo(opt, every=1, outer_lr=1.0, outer_momentum=0.0)),
    ):
        model = models.make("gpt", F64, seed=rank)  # rank 0's weights count
        ours = train(model, wrap(sgd(model.parameters())))
        found[f"{name}: loss"] = max(abs(a - b) / b for a, b in zip(ours, losses, strict=True))
        found[f"{name}: parameters"] = difference(model, state)

    model = models.make("gpt", F64)
    train(model, LocalSGD(momentum(model.parameters()), every=3))  # not equal at the end
    found["every=3"] = difference(model, simulate(n, momentum, every(3), rank=rank))

    model = models.make("gpt", F64)
    train(model, DiLoCo(adamw(model.parameters()), every=4))
    found["DiLoCo every=4"] = difference(model, simulate(n, adamw, Outer(4)))

    model = models.make("conv", F64)
    train(model, LocalSGD(sgd(model.parameters()), every=4), "conv")
    found["statistics"] = difference(model, simulate(n, sgd, every(4), "conv"))
    return found


def diloco_in_many() -> float:
    model = models.make("gpt", F64)
    train(model, DiLoCo(adamw(model.parameters()), every=4))
    return difference(model, simulate(dist.get_world_size(), adamw, Outer(4)))


def hierarchical() -> dict[str, Any]:
    """Averages inside pairs every 2 steps, over all every 6."""

    def meet(step: int, workers: list[nn.Module]) -> None:
        if step % 6 == 0:
            equalise(workers)
        elif step % 2 == 0:
            equalise(workers[:2])
            equalise(workers[2:])

    model = models.make("gpt", F64)
    opt = LocalSGD(sgd(model.parameters()), every=2, between=6, group_size=2)
    made = len(dist.distributed_c10d._world.pg_map)
    train(model, opt, steps=4)
    pairs: list[Any] = [None] * 4
    dist.all_gather_object(pairs, [p.detach().clone() for p in model.parameters()])
    train_on(model, opt, 4, STEPS)
    again = LocalSGD(sgd(models.make("gpt", F64).parameters()), every=2, between=6, group_size=2)
    return {
        "difference": difference(model, simulate(4, sgd, meet, rank=dist.get_rank())),
        "pairs": [equal(pairs[0], other) for other in pairs],
        "groups made again": len(dist.distributed_c10d._world.pg_map) - made,
        "repr": repr(again),
        "one host": error_of(
            lambda: LocalSGD(sgd(models.make("gpt", F64).parameters()), every=2, between=6)
        ),
    }


def train_on(model: nn.Module, opt: torch.optim.Optimizer, begin: int, end: int) -> None:
    for step in range(begin, end):
        loss_of(model, "gpt", step, dist.get_rank(), dist.get_world_size()).backward()
        opt.step()
        opt.zero_grad()


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def bytes_sent() -> dict[str, int]:
    """Bytes that the tap counts over 8 steps, for DDP and for averages every 4."""
    tap.install("counts")
    counted = {}
    for kind in ("ddp", "LocalSGD", "DiLoCo"):
        model = models.make("gpt", F64)
        trained: nn.Module = model
        opt = sgd(model.parameters())
        if kind == "ddp":
            trained = DDP(model)
        elif kind == "LocalSGD":
            opt = LocalSGD(opt, every=4)
        else:
            opt = DiLoCo(opt, every=4)
        tap.take()
        train(trained, opt)
        counted[kind] = tap.take().bytes
        counted["parameters"] = sum(p.nbytes for p in model.parameters())
    tap.set_level("off")
    return counted


def looks_like_an_optimizer() -> dict[str, Any]:
    """Schedulers, state, closures and gradient scalers on a wrapper."""
    claims: dict[str, Any] = {}
    recorder = Recorder(dist.get_rank(), lambda batch: None)
    training.here.install(recorder)
    training.here.begin_cell()
    model = models.make("gpt", F64)
    opt = DiLoCo(adamw(model.parameters()), every=4)
    schedule = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.5)
    for step in range(6):
        loss_of(model, "gpt", step, dist.get_rank(), dist.get_world_size()).backward()
        opt.step()
        schedule.step()
        opt.zero_grad()
    claims["steps counted"] = training.here.end_cell()
    training.here.set_enabled(False)
    claims["rate inside"] = opt.optim.param_groups[0]["lr"]

    saved = copy.deepcopy(opt.state_dict())
    kept = copy.deepcopy(model.state_dict())
    train_on(model, opt, 6, 10)
    wanted = copy.deepcopy(model.state_dict())
    other = models.make("gpt", F64, seed=1)
    fresh = DiLoCo(adamw(other.parameters()), every=4)
    fresh.load_state_dict(saved)
    other.load_state_dict(kept)  # in the midst of a round each rank has its own
    train_on(other, fresh, 6, 10)
    claims["resumed"] = difference(other, wanted)

    claims["closure"] = closure_works()
    claims.update(scaler_works())
    model = models.make("gpt", F64)
    local = LocalSGD(sgd(model.parameters()), every=100)
    train(model, local, steps=3)
    local.end_round()
    theirs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, list(model.parameters()))
    claims["equal after end_round"] = all(equal(theirs[0], other) for other in theirs)
    conv = models.make("conv", F64)
    claims["repr"] = repr(LocalSGD(sgd(conv.parameters()), every=8))
    return claims


def closure_works() -> float:
    model = models.make("gpt", F64)
    opt = LocalSGD(sgd(model.parameters()), every=1)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            opt.zero_grad()
            loss = loss_of(model, "gpt", step, dist.get_rank(), dist.get_world_size())
            loss.backward()
            return loss

        opt.step(closure)
    return difference(model, by_ddp()[1])


def scaler_works() -> dict[str, Any]:
    """One rank's gradients overflow once: it leaves that update out, and no round is shifted."""
    model = nn.Linear(4, 1, bias=False)
    opt = LocalSGD(sgd(model.parameters()), every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = model.weight.detach().clone()
    moved = 0.0
    for step in range(4):
        overflows = step == 0 and dist.get_rank() == 1
        x = torch.full((1, 4), float("inf") if overflows else 1.0)
        scaler.scale(model(x).sum()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        moved = float((before - model.weight.detach()).mean())
    return {"scaler: moved": moved, "scaler: steps": opt.steps}


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except LayoutError as error:
        return str(error)
    return "no error"


def wrong_use() -> dict[str, str]:
    """What a wrapper says to models and numbers that do not fit."""
    from nbdist.engine.layout.parallelize import parallelize

    made = {}
    for layout in ("ddp", "zero3"):
        model = models.make("gpt", torch.float32)
        parallelize(model, layout)
        opt = sgd(model.parameters())
        made[layout] = error_of(lambda opt=opt: LocalSGD(opt, every=8))  # type: ignore[misc]
    model = models.make("gpt", F64)
    opt = LocalSGD(sgd(model.parameters()), every=8)
    made["twice"] = error_of(lambda: DiLoCo(opt, every=8))
    parallelize(model, "ddp")
    made["spread later"] = error_of(opt.step)
    plain = models.make("gpt", F64)
    made["no optimizer"] = error_of(lambda: LocalSGD(plain, every=8))  # type: ignore[arg-type]
    made["every=0"] = error_of(lambda: LocalSGD(sgd(plain.parameters()), every=0))
    made["between"] = error_of(lambda: LocalSGD(sgd(plain.parameters()), every=4, between=10))
    name = "gpt" if dist.get_rank() == 0 else "conv"
    other = models.make(name, F64)
    made["models"] = error_of(lambda: DiLoCo(sgd(other.parameters()), every=4))
    k = 4 + dist.get_rank()
    made["asked"] = error_of(lambda: DiLoCo(sgd(plain.parameters()), every=k))
    return made
