"""Cells for dry runs: sound ones, and ones with a mistake and the words and places that tell it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A cell; for one with a mistake its kind, a place of it, and words of the sentence."""

    name: str
    code: str
    kind: str = ""
    place: str = ""
    words: tuple[str, ...] = ()
    n: int = 4
    memory: int = 0


_MODEL = """
import torch.nn.functional as F
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
"""
_DATA = """
data = torch.utils.data.TensorDataset(torch.randn(1000, 8), torch.randn(1000, 1))
"""

SOUND = [
    Case(
        "a model that is moved, and metrics gathered as objects",
        _MODEL
        + """
model = model.to(device).double()
nbdist.parallelize(model, "zero3")
loss = model(torch.randn(4, 8).double()).sum()
loss.backward()
found = [None] * world_size
dist.all_gather_object(found, {"loss": loss.item(), "n": 4})
if sum(one["loss"] for one in found) > 3:
    dist.barrier()
""",
    ),
    Case(
        "the best weights are read again",
        _MODEL
        + """
if rank == 0:
    torch.save(model.state_dict(), "best.pt")
dist.barrier()
try:
    model.load_state_dict(torch.load("best.pt"))
except FileNotFoundError:
    print("none")
""",
    ),
    Case(
        "gradients averaged by hand",
        _MODEL
        + """
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for p in model.parameters():
    dist.broadcast(p.data, src=0)
for step in range(1000):
    loss = F.mse_loss(model(torch.randn(4, 8)), torch.randn(4, 1))
    opt.zero_grad(); loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world_size
    opt.step()
""",
    ),
    Case(
        "torch's DDP with a distributed sampler",
        _MODEL
        + _DATA
        + """
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
ddp = DDP(model)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=10, sampler=sampler)
opt = torch.optim.AdamW(ddp.parameters())
for epoch in range(20):
    sampler.set_epoch(epoch)
    for step, (x, y) in enumerate(loader):
        loss = F.mse_loss(ddp(x), y)
        loss.backward(); opt.step(); opt.zero_grad()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {float(loss) * 2}")
""",
    ),
    *(
        Case(
            f"parallelize {layout}",
            _MODEL
            + f"""
block = lambda: torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
model = torch.nn.Sequential(block(), block())
layout = nbdist.parallelize(model, "{layout}")
opt = layout.optimizer(torch.optim.AdamW, lr=1e-3)
x = torch.randn(4, 6, 16)
for step in range(3):
    loss = layout.step(x, x, F.mse_loss)
    opt.step(); opt.zero_grad()
    nbdist.log(loss=loss)
""",
            n=4 if "=" in layout else 2,
        )
        for layout in ("ddp", "zero3", "tp=2 dp=2", "pp=2 dp=2")
    ),
    Case(
        "nbdist's loader and a checkpoint",
        _MODEL
        + _DATA
        + """
layout = nbdist.parallelize(model, "ddp")
opt = torch.optim.AdamW(model.parameters())
loader = nbdist.loader(data, global_batch=40)
nbdist.restore(missing_ok=True)
for epoch in range(loader.epoch, 2):
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm.item() > 1000:
            break
        opt.step(); opt.zero_grad()
    nbdist.save()
""",
        n=2,
    ),
    Case(
        "rank 0 prints and writes",
        """
import os
total = torch.randn(3).sum()
dist.all_reduce(total)
if rank == 0:
    print("total %.3f of %d" % (total.item(), world_size))
    os.makedirs("results", exist_ok=True)
    with open("results/total.txt", "w") as file:
        file.write(f"{total.item():.4f}")
    torch.save({"total": total}, "results/total.pt")
dist.barrier()
""",
    ),
    Case(
        "an object broadcast, then used as a number of turns",
        """
config = [{"epochs": 3, "name": "run"} if rank == 0 else None]
dist.broadcast_object_list(config, src=0)
for epoch in range(config[0]["epochs"]):
    dist.barrier()
""",
    ),
    Case(
        "objects gathered",
        """
every = [None] * world_size
dist.all_gather_object(every, {"rank": rank, "samples": 10 + rank})
assert sum(one["samples"] for one in every) == 10 * world_size + sum(range(world_size))
for _ in range(max(one["samples"] for one in every)):
    dist.barrier()
""",
    ),
    Case(
        "collectives of subgroups",
        """
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
mine = groups[rank // 2]
x = torch.ones(4)
dist.all_reduce(x, group=mine)
if rank < 2:
    dist.broadcast(x, src=0, group=groups[0])
""",
    ),
    Case(
        "a ring of sends and receives",
        """
x, y = torch.ones(3) * rank, torch.empty(3)
for _ in range(world_size):
    if rank % 2 == 0:
        dist.send(x, (rank + 1) % world_size)
        dist.recv(y, (rank - 1) % world_size)
    else:
        dist.recv(y, (rank - 1) % world_size)
        dist.send(x, (rank + 1) % world_size)
    x = y.clone()
""",
    ),
    Case(
        "messages that no rank waits for at once",
        """
x, y = torch.ones(3), torch.empty(3)
todo = [dist.isend(x, (rank + 1) % world_size), dist.irecv(y, (rank - 1) % world_size)]
for one in todo:
    one.wait()
""",
    ),
    Case(
        "clipped gradients",
        _MODEL
        + """
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.randn(4, 8)).mean()
loss.backward()
for p in model.parameters():
    dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
print("norm", norm.item(), f"{norm:.2f}")
opt.step()
""",
    ),
    Case(
        "stops early by a loss that all share",
        _MODEL
        + _DATA
        + """
best, bad = float("inf"), 0
for epoch in range(10):
    total = torch.zeros(())
    for x, y in torch.utils.data.DataLoader(data, batch_size=100):
        total += F.mse_loss(model(x), y)
    total = total.detach()
    dist.all_reduce(total)
    if total.item() < best:
        best, bad = total.item(), 0
    else:
        bad += 1
    if bad > 2:
        break
dist.barrier()
""",
    ),
    Case(
        "each rank logs its own best, and all decide by what one seed gives",
        """
torch.manual_seed(0)
if torch.randn(2).sum() > 0:
    dist.barrier()
torch.manual_seed(rank)
best = 1e9
for step in range(5):
    loss = torch.randn(4).pow(2).mean()
    if loss.item() < best:
        best = loss.item()
        print("better", best)
    dist.all_reduce(loss)
""",
    ),
    Case(
        "checks that numbers are finite",
        """
import math
x = torch.randn(4)
dist.all_reduce(x)
assert torch.isfinite(x).all()
if math.isnan(x.sum().item()):
    raise ValueError("nan")
assert torch.allclose(x, x)
dist.barrier()
""",
    ),
    Case(
        "parts of unequal size scattered by splits",
        """
sizes = [n + 1 for n in range(world_size)]
x = torch.ones(sum(sizes))
y = torch.empty(sizes[rank] * world_size)
dist.all_to_all_single(y, x, [sizes[rank]] * world_size, sizes)
""",
    ),
    Case(
        "the shortest loader of all ranks counts",
        """
batches = torch.tensor(100 + rank)
dist.all_reduce(batches, op=dist.ReduceOp.MIN)
for step in range(int(batches)):
    dist.barrier()
""",
    ),
    Case(
        "the whole gathered on rank 0",
        """
x = torch.ones(5) * rank
parts = [torch.empty(5) for _ in range(world_size)] if rank == 0 else None
dist.gather(x, parts, dst=0)
dist.scatter(x, parts, src=0)
dist.reduce(x, dst=1, op=dist.ReduceOp.MAX)
""",
    ),
    Case(
        "gradients accumulated without sync by torch's DDP",
        _MODEL
        + _DATA
        + """
import contextlib
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
ddp = DDP(model)
loader = DataLoader(data, batch_size=10, sampler=DistributedSampler(data))
opt = torch.optim.AdamW(ddp.parameters())
for step, (x, y) in enumerate(loader):
    is_last = (step + 1) % 4 == 0 or step + 1 == len(loader)
    with contextlib.nullcontext() if is_last else ddp.no_sync():
        (F.mse_loss(ddp(x), y) / 4).backward()
    if is_last:
        opt.step(); opt.zero_grad()
""",
    ),
    Case(
        "rank 0 alone evaluates the module within torch's DDP, and saves it",
        _MODEL
        + _DATA
        + """
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
ddp = DDP(model)
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=25, sampler=sampler)
opt = torch.optim.AdamW(ddp.parameters())
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        F.mse_loss(ddp(x), y).backward()
        opt.step(); opt.zero_grad()
    if rank == 0:
        with torch.no_grad():
            losses = [F.mse_loss(ddp.module(x), y).item() for x, y in DataLoader(data, 100)]
        print(f"epoch {epoch}: {sum(losses) / len(losses):.3f}")
        torch.save(ddp.module.state_dict(), f"epoch{epoch}.pt")
    dist.barrier()
""",
    ),
    Case(
        "metrics of validation loaders of unequal length gathered as objects",
        _MODEL
        + _DATA
        + """
own = torch.utils.data.Subset(data, range(rank, 1000 - 150 * rank, world_size))
total, seen = 0.0, 0
with torch.no_grad():
    for x, y in torch.utils.data.DataLoader(own, batch_size=16):
        total += F.mse_loss(model(x), y, reduction="sum").item()
        seen += len(x)
every = [None] * world_size
dist.all_gather_object(every, (total, seen))
print(sum(one[0] for one in every) / sum(one[1] for one in every))
dist.barrier()
""",
    ),
    Case(
        "rank 0 stops all by a flag that it broadcasts",
        _MODEL
        + """
opt = torch.optim.SGD(model.parameters(), lr=0.1)
best, bad, stop = float("inf"), 0, torch.zeros(1)
for epoch in range(50):
    F.mse_loss(model(torch.randn(4, 8)), torch.randn(4, 1)).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
    opt.step(); opt.zero_grad()
    if rank == 0:
        loss = F.mse_loss(model(torch.randn(64, 8)), torch.randn(64, 1)).item()
        bad = 0 if loss < best else bad + 1
        best = min(best, loss)
        stop.fill_(float(bad >= 3))
    dist.broadcast(stop, src=0)
    if stop.item():
        break
dist.barrier()
""",
    ),
    Case(
        "each rank in its turn, by the step",
        _MODEL
        + """
for step in range(8):
    model(torch.randn(4, 8)).mean().backward()
    if step % world_size != rank:
        continue
    for p in model.parameters():
        dist.all_reduce(p.grad)
""",
    ),
    Case(
        "even and odd ranks in other steps",
        _MODEL
        + """
for step in range(20):
    model(torch.randn(4, 8)).mean().backward()
    if (step + rank) % 2:
        continue
    dist.all_reduce(torch.ones(3))
dist.barrier()
""",
    ),
    Case(
        "rank 0 collects what others send of each step",
        _MODEL
        + """
x = torch.ones(2)
if rank == 0:
    for n in range(40 * (world_size - 1)):
        dist.recv(x)
else:
    for step in range(40):
        model(torch.randn(4, 8)).mean().backward()
        dist.send(x, 0)
""",
    ),
]

PLANTED = [
    Case(
        "rank 0 alone evaluates a DDP with batch norm",
        """
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32)))
model.eval()
if rank == 0:
    model(torch.randn(8, 20))
""",
        "hang",
        "line 7",
        ("rank 0", "broadcast"),
    ),
    Case(
        "ranks draw from numpy without a seed",
        """
import numpy as np
if np.random.rand() < 0.5:
    dist.barrier()
""",
        "hang",
        "line 4",
        ("barrier",),
    ),
    Case(
        "rank 0 alone broadcasts",
        "x = torch.ones(4)\nif rank == 0:\n    dist.broadcast(x, src=0)\n",
        "hang",
        "line 3",
        ("rank 0 alone calls broadcast from rank 0", "ranks 1-3 end the cell without it"),
    ),
    Case(
        "a barrier for rank 0 only, before that of all",
        "x = torch.ones(2)\nif rank == 0:\n    dist.barrier()\ndist.all_reduce(x)\n",
        "mismatch",
        "line 3",
        ("rank 0 calls barrier", "ranks 1-3 call all_reduce", "line 4"),
    ),
    Case(
        "two ranks that both receive first",
        "x = torch.ones(2)\nif rank == 0:\n    dist.recv(x, 1)\n    dist.send(x, 1)\n"
        "if rank == 1:\n    dist.recv(x, 0)\n    dist.send(x, 0)\n",
        "hang",
        "line 3",
        ("rank 0 waits in recv from rank 1", "rank 1 waits in recv from rank 0", "line 6"),
    ),
    Case(
        "a receive without a send",
        "x = torch.ones(2)\nif rank == 2:\n    dist.recv(x, 1)\n",
        "hang",
        "line 3",
        ("rank 2 calls recv from rank 1", "rank 1 ends the cell without the send"),
    ),
    Case(
        "tags that do not match",
        "x = torch.ones(2)\nif rank == 0:\n    dist.send(x, 1, tag=3)\n"
        "elif rank == 1:\n    dist.recv(x, 0, tag=4)\n",
        "hang",
        "line 3",
        ("tag 3", "tag 4"),
    ),
    Case(
        "two groups in other orders",
        "a, b = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1])\nx = torch.ones(2)\n"
        "if rank == 0:\n    dist.barrier(a)\n    dist.barrier(b)\n"
        "elif rank == 1:\n    dist.barrier(b)\n    dist.barrier(a)\nelse:\n    dist.barrier(a)\n",
        "hang",
        "line 4",
        ("rank 1 waits in barrier at line 7", "none can go on"),
    ),
    Case(
        "a checkpoint of rank 0 only",
        _MODEL + "if rank == 0:\n    nbdist.save()\n",
        "hang",
        "line 5",
        ("rank 0 alone calls nbdist.save",),
    ),
    Case(
        "a group that not all make",
        "x = torch.ones(2)\nif rank < 2:\n    g = dist.new_group([0, 1])\n"
        "    dist.all_reduce(x, group=g)\n",
        "hang",
        "line 3",
        ("ranks 0-1 call new_group", "ranks 2-3 end the cell without it"),
    ),
    Case(
        "sizes that differ",
        "x = torch.ones(4 if rank < 2 else 8)\ny = 1\ndist.all_reduce(x)\n",
        "mismatch",
        "line 3",
        ("all_reduce of 4 float32", "ranks 2-3 call all_reduce of 8 float32"),
    ),
    Case(
        "types that differ",
        "x = torch.ones(4)\nif rank == 3:\n    x = x.double()\ndist.all_reduce(x)\n",
        "mismatch",
        "line 4",
        ("4 float64", "rank 3"),
    ),
    Case(
        "reductions that differ",
        "x = torch.ones(4)\nop = dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM\n"
        "dist.all_reduce(x, op=op)\n",
        "mismatch",
        "line 3",
        ("(MAX)",),
    ),
    Case(
        "roots that differ",
        "x = torch.ones(4)\ndist.broadcast(x, src=rank % 2)\n",
        "mismatch",
        "line 2",
        ("from rank 0", "from rank 1"),
    ),
    Case(
        "orders that differ",
        "x, y = torch.ones(4), torch.ones(6)\nfor one in ([x, y] if rank else [y, x]):\n"
        "    dist.all_reduce(one)\n",
        "mismatch",
        "line 3",
        ("of 6 float32",),
    ),
    Case(
        "messages of other sizes",
        "if rank == 0:\n    dist.send(torch.ones(4), 1)\n"
        "elif rank == 1:\n    dist.recv(torch.ones(5), 0)\n",
        "mismatch",
        "line 2",
        ("of 4 float32", "of 5 float32"),
    ),
    Case(
        "one rank with a batch more",
        """import torch.nn.functional as F
model = torch.nn.Linear(4, 1)
size = 10 * 1250 + (10 if rank == 0 else 0)
data = torch.utils.data.TensorDataset(torch.randn(size, 4), torch.randn(size, 1))
loader = torch.utils.data.DataLoader(data, batch_size=10)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    F.mse_loss(model(x), y).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    opt.step()
""",
        "uneven",
        "line 7",
        ("ranks 1-63 stop at batch 1,250", "rank 0 at 1,251"),
        n=64,
    ),
    Case(
        "more batches on some ranks, then a barrier",
        """model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(100 + 40 * (rank % 2), 4))
for (x,) in torch.utils.data.DataLoader(data, batch_size=10):
    loss = model(x).mean()
    loss = loss.detach()
    dist.all_reduce(loss)
dist.barrier()
""",
        "uneven",
        "line 3",
        ("ranks 0, 2 stop at batch 10", "ranks 1, 3 at 14"),
    ),
    Case(
        "stops by its own loss",
        _MODEL
        + """for step in range(100):
    loss = model(torch.randn(4, 8)).pow(2).mean()
    loss.backward()
    if loss.item() < 0.1:
        break
    for p in model.parameters():
        dist.all_reduce(p.grad)
""",
        "branch",
        "line 7",
        ("line 7 decides by each rank's own number",),
    ),
    Case(
        "skips a step by its own gradients",
        _MODEL
        + """model(torch.randn(4, 8)).mean().backward()
bad = any(torch.isnan(p.grad).any() for p in model.parameters())
if not bad:
    for p in model.parameters():
        dist.all_reduce(p.grad)
""",
        "branch",
        "line 5",
        ("decides by each rank's own number",),
    ),
    Case(
        "a collective where rank 0's number is large",
        "x = torch.randn(4)\nif rank == 0 and x.max() > 3:\n    dist.all_reduce(x)\n",
        "branch",
        "line 2",
        ("rank 0 alone calls all_reduce",),
    ),
    Case(
        "all parts on each rank, which 64 have no room for",
        "x = torch.empty(350_000_000)\nparts = [torch.empty_like(x) for _ in range(world_size)]\n"
        "dist.all_gather(parts, x)\n",
        "memory",
        "line 2",
        ("out of memory at 64 ranks", "where it has"),
        n=64,
        memory=80_000_000_000,
    ),
    Case(
        "torch's DDP whose ranks accumulate over other numbers of steps",
        _MODEL
        + """import contextlib
ddp = torch.nn.parallel.DistributedDataParallel(model)
every = 2 if rank == 0 else 4
for step in range(16):
    with contextlib.nullcontext() if (step + 1) % every == 0 else ddp.no_sync():
        ddp(torch.randn(4, 8)).mean().backward()
""",
        "hang",
        "line 9",
        ("rank 0 alone calls all_reduce", "ranks 1-3 end the cell without it"),
    ),
    Case(
        "a forward of zero3 on rank 0 alone, within a training",
        _MODEL
        + """layout = nbdist.parallelize(model, "zero3")
opt = layout.optimizer(torch.optim.AdamW, lr=1e-3)
for step in range(100):
    loss = layout.step(torch.randn(4, 8), torch.randn(4, 1), F.mse_loss)
    opt.step(); opt.zero_grad()
    if rank == 0 and step % 10 == 0:
        with torch.no_grad():
            print("sample", model(torch.randn(1, 8)).shape)
""",
        "mismatch",
        "line 11",
        ("rank 0", "all_gather"),
    ),
    Case(
        "parameters that get no gradient under torch's DDP",
        """import torch.nn.functional as F
class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    def forward(self, x, both=False):
        return self.second(self.first(x)) if both else self.first(x)
ddp = torch.nn.parallel.DistributedDataParallel(Two())
opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(10):
    F.mse_loss(ddp(torch.randn(4, 8)), torch.randn(4, 8)).backward()
    opt.step(); opt.zero_grad()
""",
        "error",
        "line 11",
        ("ranks 0-3 raise RuntimeError: Expected to have finished reduction",),
    ),
    Case(
        "sums of the last batch, whose sizes ranks do not share",
        _MODEL
        + """own = torch.utils.data.TensorDataset(torch.randn(96 + 4 * (rank == 2), 8))
for (x,) in torch.utils.data.DataLoader(own, batch_size=32 if rank != 2 else 34):
    scores = model(x).detach()
    parts = [torch.empty_like(scores) for _ in range(world_size)]
    dist.all_gather(parts, scores)
""",
        "mismatch",
        "line 8",
        ("of 32 float32", "rank 2 calls all_gather of 34 float32"),
    ),
    Case(
        "rank 0 alone gathers objects of all",
        _MODEL
        + """
for epoch in range(3):
    loss = model(torch.randn(4, 8)).mean()
    loss.backward()
    if rank == 0:
        every = [None] * world_size
        dist.all_gather_object(every, loss.item())
""",
        "hang",
        "line 10",
        ("rank 0 alone calls all_gather_object", "ranks 1-3 end the cell without it"),
    ),
    Case(
        "turns by the step that do not come to all ranks",
        _MODEL
        + """for step in range(10):
    model(torch.randn(4, 8)).mean().backward()
    if step % world_size == rank:
        dist.all_reduce(torch.ones(3))
""",
        "hang",
        "line 7",
        ("ranks 0-1 call all_reduce", "ranks 2-3 end the cell without it"),
    ),
    Case(
        "uneven validation that sums its loss batch by batch",
        _MODEL
        + """n = 64 + 16 * rank
val = torch.utils.data.TensorDataset(torch.randn(n, 8), torch.randn(n, 1))
total = torch.zeros(())
with torch.no_grad():
    for x, y in torch.utils.data.DataLoader(val, batch_size=16):
        loss = F.mse_loss(model(x), y)
        dist.all_reduce(loss)
        total += loss
""",
        "uneven",
        "line 8",
        ("rank 0 stops at batch 4", "rank 3 at 7"),
    ),
]

# Ranks of a kind, of which few are run.
OF_KINDS = [
    Case("one rank of 64", "if rank == 17:\n    dist.barrier()\n", "hang", "line 2", n=64),
    Case(
        "a mesh, objects, and decisions by a loss",
        _MODEL
        + """
block = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
layout = nbdist.parallelize(block, "fsdp=2 tp=4")
x = torch.randn(4, 6, 16)
loss = layout.step(x, x, F.mse_loss)
every = [None] * world_size
dist.all_gather_object(every, loss.item())
if every[0] > 3:
    dist.barrier()
if loss.item() > 3:
    dist.barrier()
""",
        n=8,
    ),
    Case(
        "each decides by its own number, and one stays away",
        _MODEL
        + """
torch.manual_seed(7 + rank)
loss = model(torch.randn(4, 8)).mean()
if loss.item() > 1 and rank != 5:
    dist.barrier()
""",
        n=16,
    ),
]
