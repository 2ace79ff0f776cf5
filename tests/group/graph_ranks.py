"""What a rank runs in test_graphs: a captured training, with a stand-in for CUDA's graphs."""

from typing import Any

import torch

from nbdist.engine.steps import step_state
from nbdist.engine.training.scalars import Scalars
from tests.group.test_training import Watch

WARM, REPLAYS = 3, 5


class Graph:
    """Stands for `torch.cuda.CUDAGraph`: a replay runs `step`, what was captured has not run."""

    def __init__(self, step: Any) -> None:
        self.step = step

    def capture_begin(self) -> None:
        pass

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        self.step()


def train() -> dict[str, Any]:
    """Take `WARM` steps, capture one, and replay it; return the records and what was done."""
    torch.cuda.CUDAGraph = Graph  # type: ignore[misc, assignment]
    watch = Watch()
    boundary = step_state.here()
    boundary.install(lambda _: (), lambda *_: None)
    boundary.begin_cell()
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    loss = torch.zeros(())

    def step() -> None:
        nonlocal loss
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        optimizer.step()

    for _ in range(WARM):
        step()
    read: list[bool] = []
    native, Scalars.add = Scalars.add, lambda *_: read.append(True)  # type: ignore[method-assign]
    mark = boundary.last
    graph = Graph(lambda: loss.data.mul_(0.5))
    graph.capture_begin()
    step()
    graph.capture_end()
    Scalars.add = native  # type: ignore[method-assign]
    was_left_alone = not read and boundary.last is mark
    captured = loss.item()
    for _ in range(REPLAYS):
        graph.replay()
    return {
        "was_left_alone": was_left_alone,
        "captured": captured,
        "steps": boundary.steps[optimizer].whole,
        "rows": watch.rows(),
    }
