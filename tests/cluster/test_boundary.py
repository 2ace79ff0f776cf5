"""A fault between two ranks' steps, in real cells: what is said, and how the cell goes on."""

import pytest

from nbdist import RankError, Session
from nbdist.shared.errors import CellSyntaxError
from tests.cluster.test_faults import fail

BUILD = """
import torch.nn.functional as F
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
nbdist.parallelize(model, "ddp")
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
samples = [torch.full((4,), float(i)) for i in range(64)]
breaks = {BREAKS}
made = []
_ = None
"""
TRAIN = """
for x in nbdist.loader(samples, global_batch=8):
    F.mse_loss(model(x), x.mean(1, keepdim=True)).backward()
    if breaks and rank == 1 and len(made) == 5:
        breaks = False
        raise ValueError("lost")
    opt.step(); opt.zero_grad()
    made.append(x[:, 0].tolist())
"""
STATE = "(made, [p.flatten().tolist() for p in [*model.parameters(), *model.buffers()]])"


def test_a_step_that_one_rank_lost_is_copied_said_and_retried_to_the_unbroken_end(
    session: Session,
) -> None:
    session.run(BUILD.replace("{BREAKS}", "False"), track=False)
    session.run(TRAIN, track=False)
    unbroken = session.run(STATE).value_list
    session.run(BUILD.replace("{BREAKS}", "True"), track=False)

    told = fail(session, TRAIN)

    assert "Rank 1 had lost step 6: it copied the model (Sequential)" in told
    session.run("if rank == 1: made.append(None)  # the step it has copied", track=False)
    assert session.retry().ok
    state = session.run(STATE).value_list
    assert [parameters for _, parameters in state] == [parameters for _, parameters in unbroken]
    assert state[0][0] == unbroken[0][0]


CELL = """
for x in nbdist.loader(samples, global_batch=8, seed=3):
    F.mse_loss(model(x), x.mean(1, keepdim=True)).backward()
    {FAULT}
    opt.step(); opt.zero_grad()
    made.append(x[:, 0].tolist())
{END}
"""


def assert_equal_at_the_end(session: Session) -> None:
    first, second = session.run(STATE).value_list
    assert len(first[0]) == len(second[0]) == 8
    assert first[1] == second[1]


def test_a_rank_on_which_the_cell_ended_well_goes_on_as_the_one_on_which_it_failed(
    session: Session,
) -> None:
    session.run(BUILD.replace("{BREAKS}", "True"), track=False)
    end = "if breaks and rank == 1: breaks = False; raise ValueError('after all steps')"
    fail(session, CELL.replace("{FAULT}", "").replace("{END}", end))
    session.run("between = 1")
    session.run("between = 2", ranks="0")
    assert session.retry().ok
    assert_equal_at_the_end(session)


@pytest.mark.slow
def test_after_a_death_and_another_cell_the_replacement_goes_on_as_its_peers(
    session: Session,
) -> None:
    session.run(BUILD.replace("{BREAKS}", "True"), track=False)
    fault = "if breaks and rank == 1 and len(made) == 5: import os; os._exit(3)"
    told = fail(session, CELL.replace("{FAULT}", fault).replace("{END}", ""))
    assert "Rank 1 was replaced" in told
    session.run("breaks = False")
    session.run("between = 1", ranks="1")
    # Replaced once more, and by a clone of a rank that has run other cells since.
    session.restart("1")
    assert session.retry().ok
    assert_equal_at_the_end(session)


DRAW = """
for x in nbdist.loader(samples, global_batch=8, seed=3):
    drawn = random.random(), random.gauss(0, 1), float(np.random.randn()), torch.rand(()).item()
    F.mse_loss(model(x), x.mean(1, keepdim=True)).backward()
    if breaks and len(made) == 5:
        breaks = False
        raise ValueError("before the step")
    opt.step(); opt.zero_grad()
    made.append(drawn)
"""
SEED = """
import random, numpy as np
random.seed(rank); np.random.seed(rank); torch.manual_seed(rank)
"""


def test_a_lost_step_draws_once_more_what_it_had_drawn_from_every_generator(
    session: Session,
) -> None:
    session.run(BUILD.replace("{BREAKS}", "False") + SEED, track=False)
    session.run(DRAW, track=False)
    unbroken = session.run("made").value_list
    session.run(BUILD.replace("{BREAKS}", "True") + SEED, track=False)
    assert "before the step" in fail(session, DRAW)
    assert session.retry().ok
    assert session.run("made").value_list == unbroken


@pytest.mark.parametrize(
    "before", ["import asyncio\nawait asyncio.sleep(0)\n1 / 0", "%time 1 / 0", "def f(:"]
)
def test_whatever_cell_has_failed_before_a_fault_leaves_no_rank_a_step_ahead(
    session: Session, before: str
) -> None:
    with pytest.raises((RankError, CellSyntaxError)):
        session.run(before, track=False)
    with pytest.raises(RankError, match="bad metric"):
        session.run(
            """
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    opt.zero_grad(); net(torch.ones(4, 2)).sum().backward()
    if step == 2 and rank == 1: raise ValueError("bad metric")
    opt.step()
dist.barrier()
""",
            track=False,
        )
    bias = session.run("net.module.bias.item()", track=False).value_list
    assert bias[0] == bias[1]
