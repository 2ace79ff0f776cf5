"""What ranks run in test_async: a parameter server, and its order replayed in one process."""

import copy
import threading
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbdist.engine.averaging import async_sgd, messages, serving
from nbdist.engine.averaging.async_sgd import AsyncSGD
from nbdist.engine.averaging.master import Master
from nbdist.engine.averaging.staleness import Update
from nbdist.shared.errors import ClusterError
from tests.group import models
from tests.group.averaging_ranks import F64, error_of

PART = 2


def loss_of(model: nn.Module, rank: int, count: int) -> Tensor:
    """The loss of a rank's batch of this number; no other rank has it."""
    x, y = models.batch("gpt", 100 * rank + count, PART, F64)
    return models.loss_of("gpt", model(x), y)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    """The user's loop, the same on all ranks."""
    for count in range(first, first + steps):
        loss_of(model, dist.get_rank(), count).backward()
        opt.step()
        opt.zero_grad()


def replay(order: list[Update]) -> dict[str, Tensor]:
    """Apply the updates one after the other, each on the version that its worker had read."""
    model = models.make("gpt", F64)
    opt = optimizer(model)
    versions = [copy.deepcopy(model.state_dict())]
    counts: dict[int, int] = {}
    read = models.make("gpt", F64)
    for update in order:
        count = counts[update.worker] = counts.get(update.worker, -1) + 1
        read.load_state_dict(versions[update.read])
        loss_of(read, update.worker, count).backward()
        for parameter, its in zip(model.parameters(), read.parameters(), strict=True):
            parameter.grad, its.grad = its.grad, None
        opt.step()
        versions.append(copy.deepcopy(model.state_dict()))
    return versions[-1]


def difference(model: nn.Module, wanted: dict[str, Tensor]) -> float:
    state = model.state_dict()
    return max(float((state[name] - wanted[name]).abs().max()) for name in wanted)


def everyones(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def everything() -> dict[str, Any]:
    functions = (replayed, held_back, bounded, leaving, refused, scheduled, late_server)
    return {function.__name__: function() for function in functions}


def replayed() -> dict[str, Any]:
    """Ranks make different numbers of steps; the server is not rank 0."""
    rank = dist.get_rank()
    model = models.make("gpt", F64, seed=rank)  # rank 0's weights count
    opt = AsyncSGD(optimizer(model), server=1)
    train(model, opt, 4 + 2 * rank)
    seen = opt.finish()
    order = everyones(opt.order)[1]
    first = difference(model, replay(order)) if rank == 0 else 0.0
    train(model, opt, 2, first=4 + 2 * rank)  # and on
    opt.finish()
    longer = everyones(opt.order)[1]
    return {
        "updates": seen.updates,
        "by worker": [sum(u.worker == w for u in order) for w in range(3)],
        "versions": [u.written for u in order] == list(range(1, len(order) + 1)),
        "mean": abs(seen.mean - sum(u.staleness for u in order) / len(order)),
        "max": seen.max - max(u.staleness for u in order),
        "difference": first,
        "after more": difference(model, replay(longer)) if rank == 0 else 0.0,
        "hash": [float(p.detach().sum()) for p in model.parameters()],
        "own order": len(opt.order),
        "repr": repr(opt),
    }


def held_back() -> dict[str, Any]:
    """Rank 2 computes on the first version, and sends after three steps of each other rank."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    model = models.make("gpt", F64)
    opt = AsyncSGD(optimizer(model))
    if rank == 2:
        loss_of(model, rank, 0).backward()
        store.wait(["held_back/0", "held_back/1"])
        opt.step()
        opt.zero_grad()
    else:
        train(model, opt, 3)
        store.set(f"held_back/{rank}", "1")
    newest = opt.staleness.newest
    seen = opt.finish()
    return {"newest": newest, "max": seen.max, "text": str(seen)}


def bounded() -> dict[str, Any]:
    """Rank 2 is slow, and the others may not overtake it by more than three updates."""
    rank = dist.get_rank()
    model = models.make("gpt", F64)
    opt = AsyncSGD(optimizer(model), max_staleness=3)
    steps = 3 if rank == 2 else 9
    for count in range(steps):
        loss_of(model, rank, count).backward()
        if rank == 2:
            time.sleep(0.1)
        opt.step()
        opt.zero_grad()
    opt.finish()
    order = everyones(opt.order)[0]
    return {
        "max": max(u.staleness for u in order),
        "updates": len(order),
        "dropped": opt.staleness.dropped,
        "difference": difference(model, replay(order)) if rank == 0 else 0.0,
    }


def leaving() -> dict[str, Any]:
    """A rank that stops early and says so holds nobody up."""
    rank = dist.get_rank()
    model = models.make("gpt", F64)
    opt = AsyncSGD(optimizer(model), max_staleness=2)
    train(model, opt, 1 if rank == 2 else 8)
    if rank == 2:
        opt.leave()
    else:
        opt.finish()
    dist.barrier()
    if rank == 2:
        train(model, opt, 2, first=1)  # the first one on parameters that many have overtaken
    dist.barrier()
    seen = opt.finish()
    return {"updates": seen.updates, "dropped": seen.dropped}


def late_server() -> dict[str, Any]:
    """The server's rank is slow to make its part; threads of older optimizers serve already."""

    def slowly(*args: Any) -> Master:
        time.sleep(0.5)
        return Master(*args)

    model = models.make("gpt", F64)
    with mock.patch.object(async_sgd, "Master", slowly):
        opt = AsyncSGD(optimizer(model))
    train(model, opt, 1)
    return {"updates": opt.finish().updates}


def refused() -> dict[str, Any]:
    model = models.make("gpt", F64)
    opt = AsyncSGD(optimizer(model))
    groups = len(dist.distributed_c10d._world.pg_map)
    AsyncSGD(optimizer(models.make("gpt", F64)))
    opt.finish()
    return {
        "server": error_of(lambda: AsyncSGD(optimizer(model), server=3)),
        "bound": error_of(lambda: AsyncSGD(optimizer(model), max_staleness=1)),
        "group": error_of(lambda: opt.add_param_group({"params": []})),
        "groups made again": len(dist.distributed_c10d._world.pg_map) - groups,
        "threads": sum(t.name.startswith("nbdist-serving") for t in threading.enumerate()),
    }


def scheduled() -> dict[str, Any]:
    """Each worker's schedule holds for its own updates; a scaler's overflow sends nothing."""
    rank = dist.get_rank()
    model = nn.Linear(1, 1, bias=False)
    opt = AsyncSGD(torch.optim.SGD(model.parameters(), lr=2.0 ** -(8 * rank)))
    start = float(model.weight.detach())
    schedule = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for count in range(3):
        x = torch.tensor([[float("inf") if count == 2 else 1.0]])
        scaler.scale(model(x).sum()).backward()
        scaler.step(opt)
        scaler.update()
        schedule.step()
        opt.zero_grad()
    opt.finish()
    return {"moved": start - float(model.weight.detach()), "updates": opt.staleness.updates}


class Own(torch.optim.SGD):
    """An optimizer with a field of its own, which torch leaves out of copies."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.made = 0
        self.first = [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        self.made += 1
        assert self.first[0] is self.param_groups[0]["params"][0]
        return super().step(closure)


def own_fields() -> list[int | None]:
    """What the server's copy of an optimizer has counted."""
    model = nn.Linear(1, 1, bias=False)
    opt = AsyncSGD(Own(model.parameters(), lr=0.1))
    model(torch.ones(1, 1)).sum().backward()
    opt.step()
    opt.finish()
    master = async_sgd.here.masters.get(opt)
    copied: Any = None if master is None else master.optim
    return everyones(None if copied is None else copied.made)


def failing() -> str:
    """The server fails in applying an update of a worker; its own next step says so."""
    model = nn.Linear(1, 1, bias=False)
    opt = AsyncSGD(torch.optim.SGD(model.parameters(), lr=0.1))
    with mock.patch.object(messages, "unpack_gradients", side_effect=MemoryError("no room")):
        while dist.get_rank() == 0 and serving.here._failed is None:
            time.sleep(0.01)
        model(torch.ones(1, 1)).sum().backward()
        try:
            opt.step()
        except (ClusterError, RuntimeError) as error:
            return str(error)
    raise AssertionError("no error")
