"""A training that uses nbdist as a library; rank 0 writes its losses, in hexadecimal, to a file."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from problem import rows  # type: ignore[import-not-found]  # it lies beside
from torch import nn

import nbdist

rank, local_rank, world_size, device = nbdist.init(layouts=["ddp"], device="cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
nbdist.parallelize(model, "ddp")
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
    nbdist.log(mean=mean / world_size)
if rank == 0:
    Path(sys.argv[1]).write_text("\n".join([str(world_size), *losses]))
