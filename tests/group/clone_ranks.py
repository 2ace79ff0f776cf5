"""What ranks run in the tests of replacements: cells in a namespace of their own, and the clone."""

import hashlib
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

import nbdist
from nbdist.engine.compat.groups import torch_groups
from nbdist.engine.component import EndedCell
from nbdist.engine.group import ddp_hook_state, group, group_record
from nbdist.engine.recovery import reset
from nbdist.engine.recovery.clone import clone as clone_module
from nbdist.engine.recovery.clone import pickler, torch_rebuild
from nbdist.engine.steps import keep
from nbdist.engine.tap import tap

namespace: dict[str, Any] = {"__name__": "__main__", "torch": torch, "dist": dist, "nbdist": nbdist}

DEFINE = """
import os, signal
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

WIDTH = 32
armed, step = None, 0  # (step, place): this rank is killed there

class Kill(nn.Module):
    def forward(self, x):
        if armed == (step, "forward"):
            os.kill(os.getpid(), signal.SIGKILL)
        return KillBackward.apply(x)

class KillBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, gradient):
        if armed == (step, "backward"):
            os.kill(os.getpid(), signal.SIGKILL)
        return gradient

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.kill, self.norm = Kill(), nn.BatchNorm1d(WIDTH)
        self.outside = nn.Linear(WIDTH, WIDTH)
        self.outside.weight = self.inside[0].weight  # tied
    def forward(self, x):
        for i, layer in enumerate(self.inside):
            x = F.relu(layer(x))
            if i == 1:
                x = self.norm(self.kill(x))
        return self.outside(x)

def optimizer_of(kind, parameters):
    return {
        "sgd": lambda: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
        "adam": lambda: torch.optim.Adam(parameters, lr=1e-2, foreach=True),
        "adamw fused": lambda: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    }[kind]()

def halve(scale, bucket):
    buffer = bucket.buffer().mul_(scale)
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda f: f.value()[0])

def prepare(wrap, kind):
    global model, opt, schedule, loader, losses, step
    torch.manual_seed(0)
    model = wrap(Net())
    opt = optimizer_of(kind, model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 0.97 ** n)
    loader = nbdist.loader(DATA, global_batch=12, seed=3)
    losses, step = [], 0

DATA = torch.utils.data.TensorDataset(
    *(torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(2))
)

def train(until):
    global step
    x_y = None
    while step < until:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x, y = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        schedule.step()
        losses.append(loss.detach())
        step += 1

def replicated(net):
    from torch.distributed._composable.replicate import replicate
    return replicate(net, bucket_cap_mb=0.004)

def laid(net):
    nbdist.parallelize(net, "ddp")
    return net

def hooked(net):
    net = DDP(net, bucket_cap_mb=0.004)
    net.register_comm_hook(0.5, halve)
    return net

def laid_and_hooked(net):
    nbdist.parallelize(net, "ddp").register_comm_hook(0.5, halve)
    return net

class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.kill, self.out = nn.Linear(WIDTH, 3 * WIDTH), Kill(), nn.Linear(WIDTH, WIDTH)
    def forward(self, x):
        heads = [h.unflatten(-1, (2, -1)).transpose(1, 2) for h in self.qkv(x).chunk(3, -1)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(self.kill(mixed.transpose(1, 2).flatten(2)))

def in_parts(net):
    blocks = nn.Sequential(Attending(), Attending())
    policy = nbdist.ContextParallel("gather", example=torch.zeros(2, 6, WIDTH))
    nbdist.parallelize(blocks, "cp=3", policy)
    return blocks

def train_on_sequences(until):
    global step
    while step < until:
        generator = torch.Generator().manual_seed(1000 * step)  # alike on ranks of one sequence
        x, y = (torch.randn(2, 6, WIDTH, generator=generator) for _ in range(2))
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        schedule.step()
        losses.append(loss.detach())
        step += 1

def builtin_hook(net):
    net = DDP(net, bucket_cap_mb=0.004)
    net._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return net
"""

WRAPS = {
    "ddp": "lambda net: DDP(net, bucket_cap_mb=0.004)",
    "ddp, unused": "lambda net: DDP(net, bucket_cap_mb=0.004, find_unused_parameters=True)",
    "ddp, static graph": "lambda net: DDP(net, bucket_cap_mb=0.004, static_graph=True)",
    "ddp, views": "lambda net: DDP(net, bucket_cap_mb=0.004, gradient_as_bucket_view=True)",
    "ddp, hook": "hooked",
    "ddp, fp16 hook": "builtin_hook",
    "replicate": "replicated",
    "parallelize": "laid",
    "parallelize, hook": "laid_and_hooked",
}


_boundaries: list[Any] = []


def cell(source: str) -> None:
    """Run a cell in this rank's namespace; each step of it ends at a boundary."""
    if not _boundaries:
        _boundaries.append(
            register_optimizer_step_post_hook(lambda *_: ddp_hook_state.here.snapshot())
        )
    try:
        exec(compile(source, "cell", "exec"), namespace)
    finally:
        keep.here.look_in(lambda: namespace)
        group_record.here.cell_ended(EndedCell(1, source, has_succeeded=True))


def try_cell(source: str) -> dict[str, Any]:
    """Run a cell; return its error, with the group let go, or None."""
    try:
        cell(source)
    except Exception as error:
        group.abort()
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": None}


def let_go() -> int:
    """Free the main thread, as the notebook asks for when a rank has died."""
    return group.abort()


def value(expression: str) -> Any:
    """Return the value of an expression in this rank's namespace."""
    return eval(expression, namespace)


def fingerprint(expression: str = "model.parameters()") -> str:
    """Return a hash of tensors, bit by bit."""
    digest = hashlib.sha1()
    for tensor in eval(expression, namespace):
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def tensors_of_optimizer() -> str:
    """Return a hash of the optimizer's states."""
    return fingerprint(
        "[t for p in opt.param_groups[0]['params'] for t in opt.state[p].values()"
        " if isinstance(t, torch.Tensor)]"
    )


def recover(
    generation: int, source: int | None, replacements: list[int], step: int = 0
) -> dict[str, Any]:
    """Do what a rank does after a death; replacements have joined with this generation.

    Without a `source` each replacement gets the one that is most like it.
    """
    rank = dist.get_rank()
    namespace["rank"] = rank
    if rank not in replacements:
        group.reform(generation)
    healed = reset.reset_state()
    tap.reset_counts()
    began = time.monotonic()
    if source is None:
        cloned = clone_module.clone_each(
            replacements, namespace=namespace, step=step, beside=_beside
        )
    else:
        (replacement,) = replacements
        cloned = clone_module.clone(
            source, replacement, namespace=namespace, step=step, beside=_beside
        )
    return {"healed": healed, "cloned": cloned, "seconds": time.monotonic() - began}


def try_only(expression: str) -> tuple[str, str] | None:
    """Return the error of an expression, or None."""
    try:
        eval(expression, namespace)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


_part: dict[str, Any] = {}
_beside: list[clone_module.Part] = []


def register_part() -> None:
    """Have a part travel that is in no namespace, and shares an object with it."""
    _beside.append(clone_module.Part("part", lambda: dict(_part), _part.update))


def set_part(number: int) -> None:
    """Fill the part."""
    _part.update(number=number, things=namespace["things"])


def part() -> list[Any]:
    """Return the part's number, and whether it still shares the namespace's object."""
    return [_part["number"], _part["things"] is namespace["things"]]


def what_broke() -> list[str]:
    """Return what the rooms for private parts miss in what is installed."""
    return [*torch_rebuild.check(), *pickler.check()]


def group_count() -> int:
    """Return the number that the next group's name is made of."""
    return torch_groups.group_count()


def spec_of(description: str) -> tuple[Any, ...] | None:
    """Return name, ranks, timeout and description of the group described so, if there is one."""
    for live in torch_groups.live_groups():
        if live.group.group_desc == description:
            spec = torch_groups.spec_of(live.group)
            return live.name, live.ranks, spec.timeout_s, spec.description
    return None


def sum_over(group: str) -> float:
    """Return 2 ** rank summed over the ranks of a group, given by an expression."""
    total = torch.tensor(2.0 ** dist.get_rank())
    dist.all_reduce(total, group=value(group))
    return total.item()
