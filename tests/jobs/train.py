"""A training as scripts for torchrun are; rank 0 writes its losses, in hexadecimal, to a file."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.randn(64, 8)
y = x.sum(1, keepdim=True)
losses = []
for _ in range(10):
    loss = nn.functional.mse_loss(model(x[rank::world_size]), y[rank::world_size])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(float((mean / world_size).item()).hex())
if rank == 0:
    Path(sys.argv[1]).write_text("\n".join([str(world_size), *losses]))
dist.destroy_process_group()
