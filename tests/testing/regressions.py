"""One small notebook that is a test, and twenty mistakes that someone may make in it.

A mistake replaces a piece of a cell; what the test must say is part of the failure's text.
"""

from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

SETUP = """%%distributed
import os, time, signal
from torch import nn

class Sums(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return i, self.x[i], self.x[i].sum(-1, keepdim=True)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
layout = nbdist.parallelize(model, "ddp")
loader = nbdist.loader(Sums(), global_batch=8)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
seen = torch.zeros(96)
"""
TRAIN = """%%distributed --run sums --no-track
for epoch in range(6):
    for i, x, y in loader:
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        seen[i] += 1
    nbdist.log(error=loss.item() ** 0.5)
dist.all_reduce(seen)
most, least = seen.max().item() / 6, seen.min().item() / 6
"""
CELLS = (
    "%load_ext nbdist\n%dist start -n 4 --threads 1",
    SETUP,
    TRAIN,
    "%dist expect no alarms",
    "%dist expect loss < 0.5\n%dist expect error < 0.7",
    "%dist expect collectives == last\n%dist expect bytes 1 %\n%dist expect bytes 1 % of explain",
    "%dist expect step <= 2 x baseline",
    "%dist expect most == 1\n%dist expect least == 1",
    "%dist expect parity",
)
_STEP = "        opt.step()\n"


@dataclass(frozen=True, slots=True)
class Mistake:
    """`old` is replaced by `new` where it stands; `says` is in the failure of code cell `cell`."""

    old: str
    new: str
    cell: int
    says: str


MISTAKES = {
    "loss_too_high": Mistake("lr=0.1", "lr=1e-5", 5, "loss < 0.5 does not hold: loss is"),
    "wrong_gradient": Mistake(
        "opt = torch",
        "model[2].bias.register_hook(lambda g: g * 1.01)\nopt = torch",
        9,
        "DIFFERS: the gradient of 2.bias",
    ),
    "one_all_reduce_more": Mistake(
        _STEP, f"        dist.all_reduce(loss.detach())\n{_STEP}", 6, "a step makes 2 all_reduce"
    ),
    "a_rank_raises": Mistake(
        _STEP, f"{_STEP}        if rank == 1 and epoch == 2: 1 / 0\n", 3, "ZeroDivisionError"
    ),
    "samples_twice": Mistake(
        "nbdist.loader(Sums(), global_batch=8)",
        "torch.utils.data.DataLoader(Sums(), batch_size=4, shuffle=True)",
        4,
        "All ranks learn from the same samples",
    ),
    "loss_is_nan": Mistake(
        "        loss.backward()",
        "        (loss * (1 if epoch < 3 else float('nan'))).backward()",
        4,
        "The loss is NaN",
    ),
    "nothing_averages": Mistake(
        'layout = nbdist.parallelize(model, "ddp")',
        "layout = None",
        4,
        "Each rank trains a model of its own",
    ),
    "ranks_drift": Mistake(
        _STEP,
        f"{_STEP}        if rank == 1: model[0].weight.data[0, 0] += 1e-3\n",
        4,
        "Replicas differ",
    ),
    "averaged_twice": Mistake(
        _STEP,
        f"        for p in model.parameters(): dist.all_reduce(p.grad); p.grad /= 2\n{_STEP}",
        4,
        "Gradients are averaged twice",
    ),
    "trains_nothing": Mistake(
        "opt = torch.optim.SGD(model.parameters()",
        "other = nn.Linear(3, 3)\nopt = torch.optim.SGD(other.parameters()",
        4,
        "trains nothing",
    ),
    "another_all_reduce_in_some_steps": Mistake(
        _STEP,
        f"        if epoch == 3: dist.all_reduce(loss.detach())\n{_STEP}",
        6,
        "some steps make others beside",
    ),
    "twice_the_bytes": Mistake(
        "nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)",
        "nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)",
        6,
        "bytes 1 % does not hold",
    ),
    "another_layout": Mistake('"ddp"', '"zero3"', 6, "all_gather"),
    "half_of_the_samples": Mistake(
        "return len(self.x)", "return len(self.x) // 2", 8, "least == 1 does not hold"
    ),
    "a_slower_step": Mistake(
        _STEP, f"        time.sleep(0.05)\n{_STEP}", 7, "step <= 2 x baseline does not hold"
    ),
    "a_straggler": Mistake(
        "        loss.backward()",
        "        if rank == 1: time.sleep(0.04)\n        loss.backward()",
        4,
        "ank 1 ",
    ),
    "a_mismatch": Mistake(
        _STEP,
        f"        dist.broadcast(loss.detach(), 0) if rank else dist.barrier()\n{_STEP}",
        3,
        "Collective #",
    ),
    "a_rank_is_killed": Mistake(
        _STEP,
        f"{_STEP}        if rank == 1 and epoch == 2: os.kill(os.getpid(), signal.SIGKILL)\n",
        3,
        "killed by SIGKILL",
    ),
    "a_layout_that_does_not_fit": Mistake('"ddp"', '"fsdp=3"', 2, "LayoutError"),
    "a_hang": Mistake(
        _STEP, f"{_STEP}        if rank == 1: time.sleep(10_000)\n", 3, "took longer than"
    ),
}
FEW = ("wrong_gradient",)  # that `make test` runs


def write(path: Path, mistake: Mistake | None = None) -> None:
    """Write the notebook, with a mistake in it or none."""
    cells = list(CELLS)
    if mistake is not None:
        places = [n for n, cell in enumerate(cells) if mistake.old in cell]
        assert len(places) == 1, f"{mistake.old!r} stands in {len(places)} cells"
        cells[places[0]] = cells[places[0]].replace(mistake.old, mistake.new)
    text = new_markdown_cell("# Sums of eight numbers")
    nbformat.write(new_notebook(cells=[text, *map(new_code_cell, cells)]), path)
