"""Loops over two loaders within each other: run again, they go on in the midst of both."""

import pytest

from nbdist import RankError, Session

MAKE = """
torch.manual_seed(0)
net = torch.nn.Linear(3, 1)
layout = nbdist.parallelize(net, "LAYOUT")
opt = layout.optimizer(torch.optim.SGD, lr=0.1)
class Noisy(torch.utils.data.Dataset):
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i): return torch.full((3,), i / self.n) + NOISE * torch.rand(3)
tasks = nbdist.loader(Noisy(8), global_batch=2, seed=1)
items = nbdist.loader(Noisy(12), global_batch=4, seed=2)
n, has_failed = 0, not (FAILS)
def fail(place):
    global has_failed
    if place == "PLACE" and n >= 5 and not has_failed:
        has_failed = True
        raise ValueError("planted")
"""
BODY = """
    for task in tasks:
        fail("before")
        for item in items:
            (net(task) * net(item)).pow(2).mean().backward()
            fail("backward")
            opt.step(); opt.zero_grad()
            n += 1
            fail("log")
        fail("after")
"""
LOOP = f"for epoch in range(2):\n{BODY}"
ENDED = "([p.double().sum().item() for p in net.parameters()], n)"


def make(session: Session, layout: str, fails: str, place: str = "", *, noise: float = 0.1) -> None:
    code = MAKE.replace("LAYOUT", layout).replace("FAILS", fails).replace("PLACE", place)
    session.run(code.replace("NOISE", str(noise)), track=False)


def ended(session: Session) -> list[object]:
    return list(session.run(ENDED, track=False).value_list)


@pytest.mark.parametrize("fails", ["True", "rank == 1"])
@pytest.mark.parametrize("place", ["before", "backward", "log", "after"])
@pytest.mark.parametrize("layout", ["ddp", "zero1"])
def test_a_fault_within_an_inner_loop_loses_and_repeats_no_step(
    session: Session, layout: str, place: str, fails: str
) -> None:
    make(session, layout, "False")
    session.run(LOOP, track=False)
    undisturbed = ended(session)
    make(session, layout, fails, place)
    with pytest.raises(RankError, match="planted"):
        session.run(LOOP, track=False)
    session.retry()
    assert ended(session) == undisturbed


def test_a_second_fault_in_the_cell_that_is_run_again_costs_nothing_either(
    session: Session,
) -> None:
    make(session, "ddp", "False")
    session.run(LOOP, track=False)
    undisturbed = ended(session)
    make(session, "ddp", "True", "backward")
    with pytest.raises(RankError, match="planted"):
        session.run(LOOP, track=False)
    session.run("def fail(place):\n    if n == 16 and place == 'log': raise ValueError('again')")
    with pytest.raises(RankError, match="again"):
        session.retry()
    session.run("def fail(place): pass")
    session.retry()
    assert ended(session) == undisturbed


def test_a_training_that_was_saved_in_an_inner_loop_goes_on_there(session: Session) -> None:
    loop = f"while tasks.epoch < 2:\n{BODY}"
    make(session, "ddp", "False", noise=0)
    session.run(loop.replace('fail("log")', 'nbdist.save("inner") if n == 8 else 0'), track=False)
    undisturbed = ended(session)
    make(session, "ddp", "False", noise=0)
    session.run('nbdist.restore("inner")\nn = 8\n' + loop, track=False)
    assert ended(session) == undisturbed


def test_a_validation_within_a_training_is_no_part_of_its_batch(session: Session) -> None:
    loop = """
for epoch in range(2):
    for task in tasks:
        net(task).pow(2).mean().backward()
        opt.step(); opt.zero_grad()
        n += 1
        for item in items:
            fail("log")
"""
    make(session, "ddp", "False", noise=0)
    session.run(loop, track=False)
    undisturbed = ended(session)
    make(session, "ddp", "True", "log", noise=0)
    with pytest.raises(RankError, match="planted"):
        session.run(loop, track=False)
    session.retry()
    assert ended(session) == undisturbed
