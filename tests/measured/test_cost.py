"""What `session.cost` says of a rank, against what it is measured to take more than a bare loop."""

from statistics import median

import pytest

import nbdist
from tests.cluster.conftest import LONGEST_S, ROOT

NEAR = 0.3
# Parts of the main thread; of others the system keeps count.
MAIN = ("tap", "hooks", "boundary", "random", "checks")

# In one cell blocks of steps that are watched, and of steps for which hooks and tap are taken out.
TRAIN = """
import time
from torch import nn
from nbdist.engine.compat import torch_hooks
from nbdist.engine.steps import step_state
from nbdist.engine.tap import tap
from nbdist.engine.training import training

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(W, W), nn.ReLU(), nn.Linear(W, W), nn.ReLU(), nn.Linear(W, 8))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
x, y = torch.randn(64, W), torch.randint(0, 8, (64,))
boundary = step_state.here()

def train(steps):
    began = time.thread_time(), time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [1e6 * (now - then) / steps
            for now, then in zip((time.thread_time(), time.perf_counter()), began)]

def watch(is_watched):
    boundary.remove()
    training.here.set_enabled(is_watched)
    tap.set_level("full" if is_watched else "off")
    if is_watched:  # in the order of `rank/register`
        boundary._undo = [torch_hooks.before_optimizer_step(boundary._before_step),
                          torch_hooks.on_optimizer_step(boundary._after_step)]

train(200)  # what is measured of each step of a short cell
blocks = []
for _ in range(40):
    for is_watched in (True, False):
        watch(is_watched)
        train(3)
        blocks.append(train(50))
watch(True)
blocks
"""


@pytest.mark.slow  # it is a statement about a machine with a core to spare
@pytest.mark.parametrize("width", [208, 288])
def test_the_cost_that_is_told_is_near_the_difference_from_a_bare_loop(
    width: int, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with nbdist.start(n=1, device="cpu") as session:
        blocks = session.run(f"W = {width}\n{TRAIN}", timeout_s=LONGEST_S)[0].value
        cost = session.cost
    watched, bare = blocks[::2], blocks[1::2]  # [processor, wall] a step, 2,000 steps of each
    taken_us = median(w[0] - b[0] for w, b in zip(watched, bare, strict=True))
    told_us = sum(line.us for line in cost.lines if line.where == "rank" and line.part in MAIN)
    print(f"bare {median(b[1] for b in bare):.0f} us a step; told {told_us:.0f} us, ", end="")
    print(f"measured {taken_us:.0f} us: {100 * (told_us / taken_us - 1):+.0f} %")
    assert abs(told_us / taken_us - 1) <= NEAR
