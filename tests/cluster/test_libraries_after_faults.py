"""Models that Accelerate and Fabric have wrapped go on after faults as if there had been none.

New rank processes in each test. What comes out is compared with a computation in one process.
"""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from nbdist import RankError, Session
from tests.cluster.conftest import SharedCluster

STEPS = 24

MAKE = """
import os
from torch import nn
from torch.utils.data import DataLoader
POINTS = torch.randn(192, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
torch.manual_seed(7)
net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)).double()
made = torch.optim.AdamW(net.parameters(), lr=0.02)
plans = [torch.optim.lr_scheduler.StepLR(made, 7, 0.8)]  # of no name
{wrap}
step = 0
def train_to(last, dies=None, fails=None):
    global step
    while step < last:
        if rank == 1 and step == dies:
            os.kill(os.getpid(), 9)
        backward(model(POINTS[4 * step + 2 * rank:][:2]).pow(2).mean())
        if rank == fails:
            raise ValueError("a mistake")
        opt.step(); plan.step(); opt.zero_grad()
        step += 1
"""
WRAPS = {
    "Accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, opt, plan, data = accelerator.prepare(net, made, plans[0], DataLoader(POINTS, batch_size=4))
plans.append(plan)
backward = accelerator.backward
def places():
    process = accelerator.process_index, accelerator.local_process_index
    return *process, accelerator.is_main_process, next(iter(data)).tolist()
""",
    "Fabric": """
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
model, opt = fabric.setup(net, made)
data = fabric.setup_dataloaders(DataLoader(POINTS, batch_size=4))
plan, backward = plans[0], fabric.backward
def places():
    process = fabric.global_rank, fabric.local_rank
    return *process, fabric.is_global_zero, next(iter(data)).tolist()
""",
}
STEPS_OF_PLAN = {"Accelerate": 2, "Fabric": 1}  # in a step: Accelerate makes one for each rank
WHOLE = """
torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()
"""


@pytest.fixture
def fresh(cluster: SharedCluster, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Two ranks that have just been started."""
    cluster.stop()
    session = cluster.healthy()
    monkeypatch.chdir(cluster._folder)
    return session


def fails(session: Session, code: str) -> str:
    with pytest.raises(RankError) as error:
        session.run(code, track=False, timeout_s=60)
    return str(error.value)


def in_one_process(plan_steps: int) -> tuple[torch.Tensor, int]:
    """Return the parameters, and what the scheduler counts, after all steps without ranks."""
    points = torch.randn(192, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    plan = StepLR(optimizer, 7, 0.8)
    for step in range(STEPS):
        net(points[4 * step :][:4]).pow(2).mean().backward()
        optimizer.step()
        for _ in range(plan_steps):
            plan.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in net.parameters()]), plan.last_epoch


@pytest.mark.parametrize("library", ["Accelerate", pytest.param("Fabric", marks=pytest.mark.slow)])
def test_a_model_that_a_library_has_wrapped_goes_on_through_deaths_and_lost_steps(
    fresh: Session, library: str
) -> None:
    fresh.run(MAKE.format(wrap=WRAPS[library]), track=False)
    places = fresh.run("places()", track=False).value_list
    assert [place[0] for place in places] == [0, 1]

    fails(fresh, "train_to(20, dies=9)")
    assert fresh.run("places()", track=False).value_list == places
    fresh.run("train_to(12)", track=False)
    # The new process' step is lost; then it is the only one that knows.
    told = fails(fresh, "train_to(13, fails=1)\ndist.barrier()")
    assert "Rank 1 had lost step 13: it copied the model" in told
    assert "not all of" not in told
    fresh.run("step = 13\ntrain_to(15)", track=False)
    fails(fresh, "if rank == 0: os.kill(os.getpid(), 9)\ndist.barrier()")
    assert fresh.run("places()", track=False).value_list == places
    told = fails(fresh, "train_to(16, fails=0)\ndist.barrier()")
    assert "Rank 0 had lost step 16: it copied the model" in told
    fresh.run(f"step = 16\ntrain_to({STEPS})", track=False)

    weights, planned = in_one_process(STEPS_OF_PLAN[library])
    for of_rank in fresh.run(WHOLE, track=False).value_list:
        torch.testing.assert_close(torch.tensor(of_rank, dtype=torch.float64), weights)
    assert fresh.run("plans[0].last_epoch", track=False).value_list == [planned] * 2
