"""Evaluations before and after a training loop draw random numbers: run again, it draws its own."""

import pytest

from nbdist import RankError, Session
from nbdist.shared.text import name_ranks

MAKE = """
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
layout = nbdist.parallelize(net, "LAYOUT")
opt = layout.optimizer(torch.optim.SGD, lr=0.1)
samples = torch.arange(36.0).reshape(12, 3) / 36
items = nbdist.loader(samples, global_batch=4, seed=2)
held_out = nbdist.loader(samples, global_batch=4, seed=3)
n, has_failed = 0, not (FAILS)
def fail(place):
    global has_failed
    if place == "PLACE" and n >= AT and not has_failed:
        has_failed = True
        raise ValueError("planted")
def draw():
    torch.rand(3)
def evaluate():
    torch.rand(3)
    with torch.no_grad():
        for item in held_out:
            net(item)
"""
LOOP = """
for epoch in range(3):
    EVALUATE()
    fail("before")
    for item in items:
        (net(item) - 1).pow(2).mean().backward()
        fail("backward")
        opt.step(); opt.zero_grad()
        n += 1
        fail("log")
    fail("between")
    EVALUATE()
    fail("after")
"""
ENDED = "([p.double().sum().item() for p in net.parameters()], n)"


def make(session: Session, layout: str, fails: str, place: str = "", at: str = "0") -> None:
    code = MAKE.replace("LAYOUT", layout).replace("FAILS", fails).replace("PLACE", place)
    session.run(code.replace("AT", at), track=False)


def ended(session: Session) -> list[object]:
    return list(session.run(ENDED, track=False).value_list)


PLACES = ["before-3", "backward-3", "backward-4", "log-3", "log-4", "log-6", "between-3", "after-3"]


@pytest.mark.parametrize("fails", ["True", "rank == 1"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("layout", "evaluate"), [("ddp", "evaluate"), ("zero3", "draw")])
def test_a_loop_that_goes_on_draws_what_it_would_have_drawn(
    session: Session, layout: str, evaluate: str, place: str, fails: str
) -> None:
    loop = LOOP.replace("EVALUATE", evaluate)
    make(session, layout, "False")
    session.run(loop, track=False)
    undisturbed = ended(session)
    make(session, layout, fails, *place.split("-"))
    with pytest.raises(RankError, match="planted"):
        session.run(loop, track=False)
    session.retry()
    assert ended(session) == undisturbed


def test_a_seed_above_the_loop_is_not_drawn_from_once_more(session: Session) -> None:
    loop = "torch.manual_seed(7)\n" + LOOP.replace("EVALUATE", "draw")
    make(session, "ddp", "False")
    session.run(loop, track=False)
    undisturbed = ended(session)
    make(session, "ddp", "True", "log", "4")
    with pytest.raises(RankError, match="planted"):
        session.run(loop, track=False)
    session.retry()
    assert ended(session) == undisturbed


def test_the_rest_of_a_half_step_that_is_done_by_hand_draws_for_the_loop(session: Session) -> None:
    loop = LOOP.replace("EVALUATE", "draw").replace(
        'n += 1\n        fail("log")', 'fail("log")\n        torch.rand(2); n += 1'
    )
    make(session, "ddp", "False")
    session.run(loop, track=False)
    undisturbed = ended(session)
    make(session, "ddp", "True", "log", "4")
    with pytest.raises(RankError, match=r"half done on ranks 0-1: n has not followed"):
        session.run(loop, track=False)
    session.run("torch.rand(2); n += 1", track=False)
    session.retry()
    assert ended(session) == undisturbed


UNFINISHED = "the code between the optimizer's step 5 and the next batch did not run to its end"


@pytest.mark.parametrize(("fails", "ranks"), [("True", "0,1"), ("rank == 1", "1")])
def test_random_numbers_that_a_half_step_has_not_drawn_are_named_and_can_be_drawn(
    session: Session, fails: str, ranks: str
) -> None:
    loop = LOOP.replace("EVALUATE", "draw").replace('"log")', '"log"); torch.rand(2)')
    make(session, "ddp", "False")
    session.run(loop, track=False)
    undisturbed = ended(session)
    make(session, "ddp", fails, "log", "5")
    with pytest.raises(
        RankError, match=f"On {name_ranks(map(int, ranks.split(',')))} {UNFINISHED}: random"
    ):
        session.run(loop, track=False)
    session.run("torch.rand(2)", ranks=ranks, track=False)
    session.retry()
    assert ended(session) == undisturbed


@pytest.mark.parametrize("place", ["backward", "between"])
def test_a_step_that_is_whole_or_not_begun_has_no_unfinished_rest(
    session: Session, place: str
) -> None:
    make(session, "ddp", "True", place, "5")
    with pytest.raises(RankError, match="planted") as failed:
        session.run(LOOP.replace("EVALUATE", "draw"), track=False)
    assert "did not run to its end" not in str(failed.value)
