"""A training as scripts for torchrun are; rank 0 writes its losses, in hexadecimal, to a file."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from problem import rows  # type: ignore[import-not-found]  # it lies beside
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
orders: list[list[str]] = [[]] * world_size
dist.all_gather_object(orders, list(set("abcdefgh")))
assert len({tuple(order) for order in orders}) == 1, orders
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x, y = rows(rank, world_size)
losses = []
for _ in range(10):
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(float((mean / world_size).item()).hex())
if rank == 0:
    Path(sys.argv[1]).write_text("\n".join([str(world_size), *losses]))
dist.destroy_process_group()
time.sleep(0.1)  # gloo's thread drops its last collective, for which torch may abort at an exit
