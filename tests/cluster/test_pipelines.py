"""Faults in the midst of a pipeline's step: one error that names its cause, and what can go on."""

import re

import pytest

from nbdist import RankError, Session
from tests.cluster.test_faults import fail

BEGIN = """
import os
class Skipping(torch.nn.Sequential):  # two tensors go from the first stage to the last
    def forward(self, x):
        first = self[0](x)
        return self[3](self[2](self[1](first))) + first
torch.manual_seed(0)
model = Skipping(
    *[torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(4)]
)
layout = nbdist.parallelize(model, "pp=2", nbdist.Pipeline(microbatches=4))
opt = torch.optim.Adam(model.parameters(), lr=0.1)
calls, breaks, dies = 0, None, None

def loss_fn(out, y):
    global calls
    calls += 1
    if calls == breaks:
        raise ValueError("no loss of this micro-batch")
    if calls == dies:
        os.kill(os.getpid(), 9)
    return (out - y).pow(2).mean()

def train():
    x = torch.linspace(-1, 1, 32).view(8, 4)
    loss = layout.step(x, x.flip(0), loss_fn)
    opt.step()
    opt.zero_grad()
    return None if loss is None else loss.item()
"""
THREE_STEPS = "[train() for _ in range(3)]"


def losses(session: Session) -> list[float]:
    session.run(BEGIN)
    first, last = session.run(THREE_STEPS, track=False).value_list
    assert first == [None] * 3
    return last


def named_as_lost(told: str) -> set[str]:
    found = re.search(r"The shards of (.+) that rank 1 held are lost: build them again", told)
    return set(found[1].split(", ")) if found else set()


@pytest.mark.slow
def test_an_exception_in_the_last_stages_loss_is_one_error_and_the_next_step_is_right(
    session: Session,
) -> None:
    expected = losses(session)
    session.run(BEGIN)
    assert session.run("train()", track=False).value_list == [None, expected[0]]
    session.run("breaks = calls + 3")
    told = fail(session, "train()", track=False)
    assert "1 of 2 ranks failed; rank 0 was released while waiting" in told
    assert "rank 1 (localhost, cpu)" in told
    assert told.count("ValueError: no loss of this micro-batch") == 2  # the line, and its traceback
    session.run("breaks = None")  # the batch that was lost is counted again
    again = session.run("[train() for _ in range(2)]", track=False).value_list
    assert again == [[None] * 2, expected[1:]]


@pytest.mark.slow
def test_a_stage_that_died_is_said_to_be_lost_and_all_else_is_kept(session: Session) -> None:
    expected = losses(session)
    session.run(BEGIN)
    session.run("train(); kept = 40 + 2; dies = calls + 3", track=False)
    told = fail(session, "train()", track=False)
    assert "rank 1 (localhost, cpu) died: killed by SIGKILL" in told
    assert "Rank 1 died with a part of Skipping, of which there is no second copy." in told
    assert named_as_lost(told) >= {"model", "layout", "opt"}  # other tests' names may be lost too
    assert "run the cells that create what is lost again" in told

    with pytest.raises(RankError) as refused:
        session.run("train()", track=False, retry=3)
    assert "it is cut into stages, and those of this rank died with it" in str(refused.value)
    assert session.run("kept").value_list == [42, 42]
    assert losses(session) == expected
