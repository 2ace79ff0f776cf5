"""Training programs for two ranks: right ones, and one for each wrong use that is looked for."""

_DATA = """
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(64, 6), torch.randint(3, (64,))
dataset = TensorDataset(x, y)

def net(*inner):
    return nn.Sequential(nn.Linear(6, 8), *inner, nn.ReLU(), nn.Linear(8, 3))

def fit(model, loader, opt, steps=12, backward=None):
    done = 0
    while done < steps:
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward() if backward is None else backward(loss)
            opt.step()
            opt.zero_grad()
            done += 1

def averaged_by_hand(model):
    def backward(loss):
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world_size
    return backward

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)

def batches():
    return nbdist.loader(dataset, global_batch=8)
"""

_WRONG = {
    "the wrapper is bypassed": """
ddp = DDP(net())
fit(ddp.module, batches(), sgd(ddp))
""",
    "gradients averaged twice": """
model = net()
nbdist.parallelize(model, "ddp")
fit(model, batches(), sgd(model), backward=averaged_by_hand(model))
""",
    "gradients averaged never": """
model = net()
fit(model, batches(), sgd(model))
""",
    "never parallelized, and never seeded": """
torch.manual_seed(rank)
model = net()
fit(model, batches(), sgd(model))
""",
    "optimizer made before the layout": """
from torch.distributed.fsdp import fully_shard
model = net()
opt = sgd(model)
fully_shard(model)
fit(model, batches(), opt)
""",
    "different initial weights": """
torch.manual_seed(rank)
model = net()
fit(model, batches(), sgd(model), backward=averaged_by_hand(model))
""",
    "shards of different initial weights": """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(rank)
model = net()
fully_shard(model[0])
fully_shard(model)
fit(model, batches(), sgd(model))
""",
    "fp16 of a layout, and no scaler": """
model = net()
nbdist.parallelize(model, "ddp", nbdist.Precision("fp16"))
fit(model, batches(), sgd(model))
""",
    "fp16 by autocast, and no scaler": """
ddp = DDP(net())
with torch.autocast("cpu", torch.float16):
    fit(ddp, batches(), sgd(ddp))
""",
    "fp16 of shards by hand, and no scaler": """
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
model = fully_shard(net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
fit(model, batches(), sgd(model), backward=lambda loss: loss.float().backward())
""",
    "a scaled loss, and steps past the scaler": """
model = net()
layout = nbdist.parallelize(model, "ddp", nbdist.Precision("fp16"))
def backward(loss):
    layout.scaler.scale(loss).backward()
fit(model, batches(), sgd(model), backward=backward)
""",
    "same data on all ranks": """
model = net()
nbdist.parallelize(model, "ddp")
order = torch.Generator().manual_seed(1)
fit(model, DataLoader(dataset, batch_size=4, shuffle=True, generator=order), sgd(model))
""",
    "other samples in a tp group": """
model = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), nn.Linear(6, 3))
nbdist.parallelize(model, "tp=2")
fit(model, DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset)), sgd(model))
""",
    "sampler without epoch": """
model = net()
nbdist.parallelize(model, "ddp")
fit(model, DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset)), sgd(model))
""",
    "unsynchronised batch norm": """
ddp = DDP(net(nn.BatchNorm1d(8)), broadcast_buffers=False)
fit(ddp, batches(), sgd(ddp))
""",
    "forgotten no_sync": """
model = net()
nbdist.parallelize(model, "ddp")
opt = sgd(model)
for step, (x, y) in enumerate(nbdist.loader(dataset, global_batch=4)):
    (F.cross_entropy(model(x), y) / 2).backward()
    if step % 2:
        opt.step()
        opt.zero_grad()
""",
    "dropout alike on ranks with other samples": """
model = net(nn.Dropout(0.5))
nbdist.parallelize(model, "ddp")
torch.manual_seed(1)
fit(model, batches(), sgd(model))
""",
    "dropout that differs in a tp group": """
model = nn.Sequential(
    nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), nn.Dropout(0.5), nn.Linear(6, 3)
)
nbdist.parallelize(model, "tp=2")
torch.manual_seed(rank)
fit(model, batches(), sgd(model))
""",
    "one rank left in evaluation mode": """
model = net(nn.Dropout(0.5))
nbdist.parallelize(model, "zero3")
torch.manual_seed(rank)
if rank == 0:
    model.eval()
fit(model, batches(), sgd(model))
""",
    "gradients that are never zeroed": """
model = net()
nbdist.parallelize(model, "zero3")
opt = sgd(model)
for x, y in batches():
    F.cross_entropy(model(x), y).backward()
    opt.step()
""",
    "an optimizer that never steps": """
model = net()
nbdist.parallelize(model, "zero3")
opt = sgd(model)
for x, y in batches():
    F.cross_entropy(model(x), y).backward()
    opt.zero_grad()
""",
    "thawed after DDP had wrapped it": """
model = net()
model[0].requires_grad_(False)
ddp = DDP(model)
model[0].requires_grad_(True)
fit(ddp, batches(), sgd(ddp))
model[0].requires_grad_(False)
""",
    "one rank changes a frozen weight, last of all": """
model = net()
model[0].requires_grad_(False)
nbdist.parallelize(model, "ddp")
fit(model, batches(), sgd(model), steps=8)
if rank == 1:
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-3
""",
    "one rank changes a weight": """
model = net()
nbdist.parallelize(model, "ddp")
opt = sgd(model)
fit(model, batches(), opt, steps=8)
if rank == 1:
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-3
fit(model, batches(), opt, steps=8)
""",
}

# The first words of what is said.
SAYS = {
    "the wrapper is bypassed": "Gradients are not averaged: 5 steps",
    "gradients averaged twice": "Gradients are averaged twice: the loop all-reduces 4 gradients",
    "gradients averaged never": "Each rank trains a model of its own",
    "never parallelized, and never seeded": "Each rank trains a model of its own: each learns from",
    "optimizer made before the layout": "The optimizer of ranks 0-1 trains nothing: none of its 4",
    "different initial weights": "Ranks average gradients of models that began with different",
    "shards of different initial weights": "fully_shard cut a model that began with different",
    "fp16 of a layout, and no scaler": "The model computes in fp16 and its loss is not scaled",
    "fp16 by autocast, and no scaler": "The model computes in fp16 and its loss is not scaled",
    "fp16 of shards by hand, and no scaler": "The model computes in fp16 and its loss is not",
    "a scaled loss, and steps past the scaler": "The loss is scaled and the optimizer steps with",
    "same data on all ranks": "All ranks learn from the same samples",
    "other samples in a tp group": "Ranks that hold parts of the same weights get different",
    "sampler without epoch": "Each epoch has the same order",
    "unsynchronised batch norm": "Batch norm keeps other running statistics on each rank",
    "forgotten no_sync": "Each of 2 backwards of a step averages all gradients",
    "dropout alike on ranks with other samples": "Dropout drops the same on all ranks",
    "dropout that differs in a tp group": "Dropout drops differently on ranks of one tp or cp",
    "one rank left in evaluation mode": "Ranks train one model in different modes: of the modules",
    "gradients that are never zeroed": "The optimizer steps with the gradients of all earlier",
    "an optimizer that never steps": "No optimizer has stepped in this cell: after 8 backwards",
    "thawed after DDP had wrapped it": "Replicas differ at the cell's end: 0.bias and 1 more",
    "one rank changes a frozen weight, last of all": (
        "Replicas differ at the cell's end: 0.weight, rank 1 against rank 0."
    ),
    "one rank changes a weight": "Replicas differ at step 10 (equal until step 5)",
}

# The cell's end leaves ranks apart, and the call that would not; the first words of what is said.
_LEFT_OPEN = {
    "LocalSGD": (
        "nbdist.LocalSGD(sgd(model), every=5)",
        "opt.end_round()",
        "has made 1 step since",
    ),
    "DiLoCo": ("nbdist.DiLoCo(sgd(model), every=6)", "opt.end_round()", "has made 4 steps since"),
    "AsyncSGD": ("nbdist.AsyncSGD(sgd(model))", "opt.finish()", "was not finished"),
}


def left_open(name: str, *, is_closed: bool) -> str:
    """Return a program whose ranks train apart, and are put together at its end or are not."""
    optimizer, close, _ = _LEFT_OPEN[name]
    end = close if is_closed else ""
    return f"{_DATA}\nmodel = net()\nopt = {optimizer}\nfit(model, batches(), opt)\n{end}\n"


LEFT_OPEN = {name: said for name, (_, _, said) in _LEFT_OPEN.items()}

_RIGHT = {
    "DistributedDataParallel": """
ddp = DDP(net())
fit(ddp, batches(), sgd(ddp))
""",
    "ddp": """
model = net()
nbdist.parallelize(model, "ddp")
fit(model, batches(), sgd(model))
""",
    "ddp, and sums of other tensors, whose memory gradients get": """
model = net()
nbdist.parallelize(model, "ddp")
def backward(loss):
    sums = [torch.zeros_like(p) for p in model.parameters() for _ in range(20)]
    for one in sums:
        dist.all_reduce(one)
    del sums, one
    loss.backward()
fit(model, batches(), sgd(model), backward=backward)
""",
    "zero2": """
model = net()
nbdist.parallelize(model, "zero2")
fit(model, batches(), sgd(model))
""",
    "gradients that all ranks drop at steps which are observed": """
model = net()
nbdist.parallelize(model, "ddp")
opt = sgd(model)
for step in range(1, 13):
    F.cross_entropy(model(x), y).backward()
    if step in (2, 5, 10):
        opt.zero_grad()
    opt.step()
    opt.zero_grad()
""",
    "an encoder with an optimizer of its own, frozen and then thawed": """
model = net()
nbdist.parallelize(model, "ddp")
optimizers = [sgd(model[0]), sgd(model[2])]
for step in range(1, 13):
    model[0].requires_grad_(step > 6)
    F.cross_entropy(model(x), y).backward()
    for opt in optimizers:
        opt.step()
        opt.zero_grad()
""",
    "zero3, clipped": """
model = net()
layout = nbdist.parallelize(model, "zero3")
def backward(loss):
    loss.backward()
    layout.clip_grad_norm_(0.1)
fit(model, batches(), sgd(model), backward=backward)
""",
    "tp, with dropout": """
model = nn.Sequential(
    nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), nn.Dropout(0.5), nn.Linear(6, 3)
)
nbdist.parallelize(model, "tp=2")
fit(model, batches(), sgd(model))
""",
    "accumulation": """
model = net()
layout = nbdist.parallelize(model, "ddp")
opt, parts = sgd(model), iter(nbdist.loader(dataset, global_batch=4))
for step in range(6):
    for part in layout.accumulate(2):
        x, y = next(parts)
        (F.cross_entropy(model(x), y) / 2).backward()
    opt.step()
    opt.zero_grad()
""",
    "accumulation under zero1, whose optimizer sends weights": """
model = net()
layout = nbdist.parallelize(model, "zero1")
opt = layout.optimizer(torch.optim.Adam, lr=0.01)
parts = iter(nbdist.loader(dataset, global_batch=4))
for step in range(6):
    for part in layout.accumulate(2):
        x, y = next(parts)
        (F.cross_entropy(model(x), y) / 2).backward()
    opt.step()
    opt.zero_grad()
""",
    "no_sync": """
ddp = DDP(net())
opt, parts = sgd(ddp), iter(nbdist.loader(dataset, global_batch=4))
for step in range(6):
    with ddp.no_sync():
        x, y = next(parts)
        F.cross_entropy(ddp(x), y).backward()
    x, y = next(parts)
    F.cross_entropy(ddp(x), y).backward()
    opt.step()
    opt.zero_grad()
""",
    "two models that play against each other": """
making, judging = net(), nn.Linear(3, 1)
nbdist.parallelize(making, "ddp")
nbdist.parallelize(judging, "ddp")
first, second = sgd(making), sgd(judging)
for x, y in batches():
    judging(making(x)).square().mean().backward()
    first.step()
    second.zero_grad()
    judging(making(x).detach()).mean().backward()
    second.step()
    first.zero_grad()
    second.zero_grad()
""",
    "a GAN, with three backwards through the judge": """
torch.manual_seed(0)
making, judging = DDP(nn.Linear(4, 8)), DDP(nn.Linear(8, 1))
first, second = sgd(making), sgd(judging)
drawn = torch.Generator().manual_seed(rank)
for _ in range(12):
    judging.zero_grad()
    F.softplus(-judging(torch.randn(8, 8, generator=drawn))).mean().backward()
    fake = making(torch.randn(8, 4, generator=drawn))
    F.softplus(judging(fake.detach())).mean().backward()
    second.step()
    making.zero_grad()
    F.softplus(-judging(fake)).mean().backward()
    first.step()
""",
    "two models in turn": """
one, other = net(), net()
nbdist.parallelize(one, "ddp")
nbdist.parallelize(other, "ddp")
first, second = sgd(one), sgd(other)
for x, y in batches():
    F.cross_entropy(one(x), y).backward()
    first.step()
    first.zero_grad()
    F.cross_entropy(other(x), y).backward()
    second.step()
    second.zero_grad()
""",
    "a model beside it that one rank alone trains": """
model = net(nn.BatchNorm1d(8))
nbdist.parallelize(model, "ddp")
opt, other = sgd(model), net()
probe = sgd(other)
for step, (x, y) in enumerate(batches()):
    for _ in range(3 if rank == 0 and step > 1 else 0):
        F.cross_entropy(other(x), y).backward()
        probe.step()
        probe.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
""",
    "evaluation after each pass": """
model = net(nn.BatchNorm1d(8))
nbdist.parallelize(model, "ddp")
opt, loader = sgd(model), batches()
for epoch in range(2):
    fit(model.train(), loader, opt, steps=8)
    with torch.no_grad():
        model.eval()(x)
""",
    "statistics that are frozen, and one rank that evaluates with gradients": """
model = net(nn.BatchNorm1d(8), nn.Dropout(0.5))
ddp = DDP(model)
torch.manual_seed(rank)
opt = sgd(ddp)
for x, y in batches():
    model.train()
    model[1].eval()
    F.cross_entropy(ddp(x), y).backward()
    opt.step()
    opt.zero_grad()
    if rank == 0:
        model.eval()(x)
""",
    "two optimizers, one of which steps half as often": """
model = net()
nbdist.parallelize(model, "ddp")
first, second = sgd(model[0]), sgd(model[2])
for step, (x, y) in enumerate(batches()):
    F.cross_entropy(model(x), y).backward()
    first.step()
    first.zero_grad()
    if step % 2:
        second.step()
        second.zero_grad()
""",
    "gradients that are set to zero, between forward and backward": """
ddp = DDP(net(), gradient_as_bucket_view=True)
opt = sgd(ddp)
for x, y in batches():
    loss = F.cross_entropy(ddp(x), y)
    opt.zero_grad(set_to_none=False)
    loss.backward()
    opt.step()
""",
    "weights that the loop changes itself, beside an optimizer": """
model = net()
layout, opt = nbdist.parallelize(model, "ddp"), sgd(model)
for x, y in batches():
    F.cross_entropy(model(x), y).backward()
    for p in model.parameters():
        p.data -= 0.05 * p.grad
    opt.zero_grad()
""",
    "gradients of a model, and an optimizer of another": """
model, other = net(), net()
opt = sgd(other)
for x, y in batches():
    F.cross_entropy(model(x), y).backward()
    model.zero_grad()
""",
    "steps that a scaler leaves out": """
model = net()
nbdist.parallelize(model, "ddp")
opt, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**127)
for x, y in batches():
    scaler.scale(1e3 * F.cross_entropy(model(x), y)).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
""",
    "dropout with a seed a rank": """
model = net(nn.Dropout(0.5))
nbdist.parallelize(model, "ddp")
torch.manual_seed(rank)
fit(model, batches(), sgd(model))
""",
    "one batch again and again": """
model = net()
nbdist.parallelize(model, "ddp")
fit(model, [(torch.ones(4, 6), torch.zeros(4, dtype=torch.long))], sgd(model))
""",
    "set_epoch": """
model, sampler = net(), DistributedSampler(dataset)
nbdist.parallelize(model, "ddp")
opt, loader = sgd(model), DataLoader(dataset, batch_size=8, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    fit(model, loader, opt, steps=1)
""",
    "batch norm": """
model = net(nn.BatchNorm1d(8))
nbdist.parallelize(model, "ddp")
fit(model, batches(), sgd(model))
""",
    "DistributedDataParallel with batch norm": """
ddp = DDP(net(nn.BatchNorm1d(8)))
fit(ddp, batches(), sgd(ddp))
""",
    "frozen layers": """
model = net()
model[0].requires_grad_(False)
nbdist.parallelize(model, "ddp")
fit(model, batches(), sgd(model))
""",
    "layers that are trained in turns": """
model = net()
nbdist.parallelize(model, "ddp")
for turn in (0, 2, 0):
    model.requires_grad_(False)
    model[turn].requires_grad_(True)
    fit(model, batches(), sgd(model), steps=6)
model.requires_grad_(False)
""",
    "weights that become NaN on all ranks": """
ddp = DDP(net())
fit(ddp, batches(), sgd(ddp), steps=1)
with torch.no_grad():  # of other bits on each
    bits = torch.tensor([0x7FC00000 + rank], dtype=torch.int32)
    ddp.module[0].weight[0, :1] = bits.view(torch.float32)
""",
    "a learning rate for each rank": """
torch.manual_seed(0)
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.01 * (rank + 1))
fit(model, DataLoader(dataset, batch_size=8), opt)
""",
    "an ensemble": """
torch.manual_seed(rank)
model = net()
fit(model, DataLoader(dataset, batch_size=8), sgd(model))
""",
    "gradients averaged by the loop": """
torch.manual_seed(0)
model = net()
fit(model, batches(), sgd(model), backward=averaged_by_hand(model))
""",
    "local SGD": """
model = net()
fit(model, batches(), nbdist.LocalSGD(sgd(model), every=100))
""",
    "a closure": """
model = net()
nbdist.parallelize(model, "ddp")
opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
for x, y in batches():
    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss
    opt.step(closure)
""",
    "GradScaler": """
model = net()
nbdist.parallelize(model, "ddp")
opt, scaler = sgd(model), torch.amp.GradScaler("cpu")
for x, y in batches():
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
""",
    "bare fully_shard": """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
model = net()
fully_shard(model[0])
fully_shard(model)
fit(model, batches(), sgd(model))
""",
    "bare fully_shard, then loaded": """
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
whole = net().state_dict()
torch.manual_seed(rank)
model = fully_shard(net())
set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
fit(model, batches(), sgd(model))
""",
    "fp16, with the layout's scaler": """
model = net()
layout = nbdist.parallelize(model, "ddp", nbdist.Precision("fp16"))
opt = sgd(model)
for x, y in batches():
    layout.scaler.scale(F.cross_entropy(model(x), y)).backward()
    layout.scaler.step(opt)
    layout.scaler.update()
    opt.zero_grad()
""",
    "fp16 by autocast, with a scaler that clips": """
ddp = DDP(net())
opt, scaler = torch.optim.Adam(ddp.parameters(), fused=True), torch.amp.GradScaler("cpu")
for x, y in batches():
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(ddp(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
""",
    "bf16 by autocast": """
ddp = DDP(net())
with torch.autocast("cpu", torch.bfloat16):
    fit(ddp, batches(), sgd(ddp))
""",
}


def left_idle() -> str:
    """Return a program that makes a model and an optimizer, for the cells that follow."""
    return f'{_DATA}\nmodel = net()\nnbdist.parallelize(model, "ddp")\nopt = sgd(model)\n'


# For four ranks: replicas of a stage, and of a shard, one of which goes its own way.
_DRIFT = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

model = Net()
layout = nbdist.parallelize(model, LAYOUT, *POLICIES)
opt = sgd(model)

def train(steps):
    for step, (x, y) in enumerate(nbdist.loader(dataset, global_batch=8)):
        if step == steps:
            break
        layout.step(x, y, F.cross_entropy)
        opt.step()
        opt.zero_grad()

train(7)
opt.param_groups[0]["lr"] = 0.0  # else it would soon be in all that ranks of tp compute
if rank == 3:
    weight = model.get_parameter("blocks.3.norm.weight")
    with torch.no_grad():
        (weight.to_local() if hasattr(weight, "to_local") else weight).add_(1e-3)
train(5)
"""


def drift(layout: str) -> str:
    """Train on four ranks, on the last of which a weight of the last block changes by itself."""
    policies = "(nbdist.Pipeline(microbatches=2),)" if "pp" in layout else "()"
    return f"{_DATA}\nLAYOUT, POLICIES = {layout!r}, {policies}\n{_DRIFT}"


WRONG = {name: _DATA + program for name, program in _WRONG.items()}
RIGHT = {name: _DATA + program for name, program in _RIGHT.items()}


def infinite_at(steps: tuple[int, ...]) -> str:
    """Return a program whose loss is infinite at these of its 20 steps, on each rank."""
    return f"""{_DATA}
model = net()
nbdist.parallelize(model, "ddp")
opt = sgd(model)
for step in range(1, 21):
    (F.cross_entropy(model(x), y) * (float("inf") if step in {steps} else 1.0)).backward()
    opt.step()
    opt.zero_grad()
"""
