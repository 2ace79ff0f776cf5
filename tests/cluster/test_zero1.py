"""`"zero1"` in a session: the wrong optimizer, and a dead rank."""

import re

import pytest

from nbdist import RankError, Session

BEGIN = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
layout = nbdist.parallelize(model, "zero1")
def train(opt, steps=1):
    for _ in range(steps):
        model(torch.ones(2, 3) + rank).pow(2).mean().backward()
        opt.step(); opt.zero_grad()
def whole():
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
"""
MAKE = "opt = layout.optimizer(torch.optim.Adam, lr=0.1)"


def alike(session: Session) -> list[float]:
    """Return the parameters, which are the same on both ranks."""
    first, second = session.run("whole()").value_list
    assert first == second
    return list(first)


def test_a_plain_optimizer_is_one_error_and_the_right_one_trains_from_where_it_was(
    session: Session,
) -> None:
    session.run(BEGIN)
    before = alike(session)
    with pytest.raises(RankError) as refused:
        session.run("opt = torch.optim.Adam(model.parameters())\ntrain(opt)", track=False)
    told = str(refused.value)
    assert 'This Adam would keep all of its states on every rank, and the layout is "zero1"' in told
    assert "layout.optimizer(torch.optim.Adam, lr=...)" in told
    assert alike(session) == before
    session.run(f"{MAKE}\nmodel.zero_grad()\ntrain(opt, 3)", track=False)
    assert alike(session) != before


@pytest.mark.slow
def test_states_that_died_with_a_rank_are_named_and_an_optimizer_made_anew_trains_on(
    session: Session,
) -> None:
    session.run(f"{BEGIN}{MAKE}\ntrain(opt, 2)", track=False)
    with pytest.raises(RankError) as killed:
        session.run("import os\nif rank: os.kill(os.getpid(), 9)\ndist.barrier()")
    told = str(killed.value)
    assert re.search(r"The shards of .*\bopt\b.* that rank 1 held are lost: build", told)
    assert "Rank 1 died with a part of the optimizer of Sequential" in told
    with pytest.raises(RankError, match="The optimizer of Sequential cannot step"):
        session.run("train(opt)", track=False)
    before = alike(session)
    # The replacement's model has the layout, too: there as well a plain optimizer is refused.
    with pytest.raises(RankError, match="2 of 2 ranks failed"):
        session.run("train(torch.optim.SGD(model.parameters(), lr=0.1))", track=False)
    session.run(f"model.zero_grad()\n{MAKE}\ntrain(opt)", track=False)
    assert alike(session) != before


def test_what_another_cell_trained_keeps_its_loader_where_one_goes_back(session: Session) -> None:
    data = "data = nbdist.loader(torch.ones(20, 3), global_batch=4)"
    session.run(f"{BEGIN}{MAKE}\n{data}\ntrain(opt)", track=False)
    session.run(
        """
other = torch.nn.Linear(3, 2)
nbdist.parallelize(other, "ddp")
other_opt = torch.optim.SGD(other.parameters(), lr=0.1)
for x in data:
    other(x).sum().backward(); other_opt.step(); other_opt.zero_grad()
""",
        track=False,
    )
    # Rank 1 waits in the midst of its step: back to the snapshot of the first cell.
    with pytest.raises(RankError, match="rolled back 0 steps, to step 1") as failed:
        session.run(
            "model(torch.ones(2, 3)).sum().backward()\n"
            "if not rank: raise ValueError('once')\n"
            "opt.step()",
            track=False,
        )

    assert "stays as it is" not in str(failed.value)
    assert session.run("data.epoch, data.consumed").value_list == [(1, 0), (1, 0)]
