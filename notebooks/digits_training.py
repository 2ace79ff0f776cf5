import os
import signal

import nbdist
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

EPOCHS = 6


class Curve(list):
    """The mean loss of every step."""

    def state_dict(self):
        return {"losses": list(self)}

    def load_state_dict(self, state):
        self[:] = state["losses"]


def train(layout, name, die_at=None):
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    pictures = torch.utils.data.TensorDataset(images, torch.tensor(digits.target))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    nbdist.parallelize(model, layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * 28)
    loader = nbdist.loader(pictures, global_batch=64, drop_last=True)
    curve = Curve()
    nbdist.keep(curve=curve)
    nbdist.restore(name, missing_ok=True)
    for _ in range(loader.epoch, EPOCHS):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            curve.append(mean.item())
            if len(curve) % 25 == 0:
                saved = nbdist.save(name)
            if len(curve) == die_at:
                saved.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    return list(curve)
