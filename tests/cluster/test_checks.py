"""What goes wrong in a training is said in its cell, once; right trainings are silent."""

import nbdist
from tests.cluster.conftest import Kernel

TRAIN = """
import torch.nn.functional as F
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
layout = nbdist.parallelize(model, "ddp")
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    model(torch.randn(2, 4) + rank).square().mean().backward()
    opt.step()
    opt.zero_grad()
    if rank == 1 and step == SPOILED:
        with torch.no_grad():
            model[2].weight.mul_(1.001)
"""


def test_replicas_that_drift_apart_are_named_while_the_cell_runs(
    notebook: Kernel, session: nbdist.Session
) -> None:
    ran = notebook.cell(TRAIN.replace("SPOILED", "3"), "--no-track")
    assert ran.error is None
    (line,) = [line for line in ran.text.splitlines() if "Replicas differ" in line]
    assert "at step 5 (alike until step 2)" in line
    assert "2.weight" in line
    assert "rank 1 against rank 0" in line


def test_a_right_training_says_nothing(session: nbdist.Session) -> None:
    session.run(TRAIN.replace("SPOILED", "-1"), track=False)
    assert session.alarms == ()
    session.run(TRAIN.replace("SPOILED", "3"), track=False)
    assert len(session.alarms) == 1
