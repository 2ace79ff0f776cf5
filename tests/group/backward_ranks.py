"""What the ranks run in test_backward_threads: one training, on the main thread or beside it."""

import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from nbdist.engine.compat import torch_hooks
from nbdist.engine.kernel import location
from nbdist.engine.kernel.records import Recorder
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.tap import tap
from nbdist.engine.training import training
from nbdist.shared.packed import CALL
from nbdist.shared.wire import Batch
from tests import bare_thread
from tests.group.truth import tell_every_step

FILE, PROMPT = "/tmp/ipykernel_1/train.py", 7
STEPS = 6
LATE, LATE_S = 3, 0.05

# Every collective of a step is told with one of these lines.
CELL = """
for step in range(STEPS):
    Late.by_s = LATE_S if step in late else 0.0
    loss = layout.step(x, y, F.mse_loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(None if loss is None else loss.item())
"""


class Late(torch.autograd.Function):
    """Comes late to what follows it in backward."""

    by_s = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(Late.by_s)
        Late.by_s = 0.0
        return gradient


class Block(nn.Module):
    """One that can be cut along tensors, and is alike to its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Late.apply(self.down(F.relu(self.up(x))))
        return x + y


def train_on_both(layouts: list[str]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Train in each layout on the main thread and beside it: starting ranks takes longer."""
    return {layout: (train(layout, False), train(layout, True)) for layout in layouts}


def train(layout: str, is_bare: bool, late_rank: int = -1) -> dict[str, Any]:
    """Train by `CELL`; rank `late_rank` is late in the backwards of the last `LATE` steps but one.

    Returns:
        `losses`, and `weights`, the sum of what this rank holds; `steps`, their records; `calls`:
        how many collectives were told of each kind and line.
    """
    published: list[dict[str, Any]] = []
    tap.install("full")
    recorder = Recorder(0, published.append)
    training.here.install(recorder)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    spread = parallelize(model, layout)
    optimizer = spread.optimizer(torch.optim.Adam, lr=0.01)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, 16, generator=generator) for _ in range(2))
    late = range(STEPS - 1 - LATE, STEPS - 1) if dist.get_rank() == late_rank else ()
    losses: list[float | None] = []
    names = {"STEPS": STEPS, "LATE_S": LATE_S, "Late": Late, "F": F, "late": late}
    names |= {"layout": spread, "x": x, "y": y, "optimizer": optimizer, "losses": losses}
    location.here.name_cell(FILE, PROMPT)
    training.here.begin_cell()
    tap.begin_cell()
    tell_every_step()
    if is_bare:
        bare_thread.install()
    exec(compile(CELL, FILE, "exec"), names)
    bare_thread.remove()
    training.here.end_cell()
    recorder.flush()
    records = [record for one in published for record in Batch.from_wire(one).records]
    calls: Counter[tuple[str, str]] = Counter()
    templates: dict[int, Any] = {}
    for record in records:
        if record.detail is not None:
            templates |= record.detail.new
            told = (templates[at] for at in record.detail.calls[:: len(CALL)])
            calls.update((template.kind, template.line) for template in told)
    return {
        "losses": losses,
        "weights": sum(float(torch_hooks.local_part(p).double().sum()) for p in model.parameters()),
        "steps": [record.values for record in records if record.kind == "step"],
        "calls": dict(calls),
    }
