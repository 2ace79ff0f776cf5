"""What ranks run in test_stateful_loader: a training over torchdata's own loader."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import nbdist
from nbdist.engine.steps import keep

_held: dict[str, Any] = {}  # models must live until the next function


def train(folder: str, steps: int, *, restores: bool) -> list[list[int]] | str:
    """Train some steps and save, or restore and go on to the end of the epoch; the samples."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    nbdist.parallelize(model, "ddp")
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    data = list(range(24))
    sampler: Any = DistributedSampler(data, seed=3)  # type: ignore[arg-type]
    loader = StatefulDataLoader(data, batch_size=2, sampler=sampler)
    nbdist.keep(train=loader)
    _held.update(model=model, opt=opt)
    try:
        if restores:
            nbdist.restore(folder)
    except nbdist.CheckpointError as error:
        return str(error)
    seen: list[list[int]] = []
    for batch in loader:
        F.mse_loss(model(batch.float()[:, None]), torch.zeros(len(batch), 1)).backward()
        opt.step()
        opt.zero_grad()
        seen.append(batch.tolist())
        if len(seen) == steps:
            nbdist.save(folder, wait=True)
            if not restores:
                break
    assert keep.here.kept()["train"] is loader
    return seen
