"""Several steps with one batch of a loader: what a fault leaves of them is said."""

import pytest

from nbdist import RankError, Session

MAKE = """
torch.manual_seed(0)
net = torch.nn.Linear(3, 1)
layout = nbdist.parallelize(net, "LAYOUT")
opt = layout.optimizer(torch.optim.SGD, lr=0.1)
A = nbdist.loader([(torch.full((3,), i / 8),) for i in range(8)], global_batch=2)
B = nbdist.loader([(torch.full((3,), i / 12),) for i in range(12)], global_batch=4)
n, has_failed = 0, not (FAILS)
def fail():
    global has_failed
    if n >= 5 and not has_failed:
        has_failed = True
        raise ValueError("planted")
def learn(x):
    global n
    net(x).pow(2).mean().backward()
    opt.step(); opt.zero_grad()
    n += 1
"""
# Each with the loader whose batch is half done; where there is none, the retry is exact.
LOOPS = {
    "a loader's": ("for (a,) in A:\n    for (b,) in B:\n        fail(); learn(a * b)", ""),
    "after it": ("for (a,) in A:\n    for (b,) in B: learn(a * b)\n    fail()", ""),
    "a range's": ("for (a,) in A:\n    for _ in range(3):\n        fail(); learn(a)", "A"),
    "an iterator that is kept": (
        """it = iter(B)
while A.epoch < 3:
    for (a,) in A:
        if n % 4 == 0: (b,) = next(it)
        learn(a); fail()
""",
        "",
    ),
    "side by side": ("while B.epoch < 3:\n  for (a,), (b,) in zip(A, B): fail(); learn(a[:2])", ""),
    "an evaluation's": (
        "while A.epoch < 3:\n  for (a,) in A:\n    learn(a); fail()\n    for (b,) in B: net(b)",
        "",
    ),
}


WEIGHTS = "[p.detach().double().sum().item() for p in net.parameters()]"


def make(session: Session, layout: str, fails: str) -> None:
    session.run(MAKE.replace("LAYOUT", layout).replace("FAILS", fails), track=False)


@pytest.mark.parametrize("fails", ["True", "rank == 1"])
@pytest.mark.parametrize("layout", ["ddp", "zero1"])
@pytest.mark.parametrize("loop", LOOPS)
def test_steps_with_one_batch_that_a_fault_has_cut_off_are_said(
    session: Session, loop: str, layout: str, fails: str
) -> None:
    cell, loader = LOOPS[loop]
    make(session, layout, "False")
    undisturbed = session.run(f"{cell}\n{WEIGHTS}", track=False).value_list

    make(session, layout, fails)
    session.run("nbdist.save('before')", track=False)
    with pytest.raises(RankError, match="planted") as failed:
        session.run(cell, track=False, retry=1 if loader else 0)
    said = str(failed.value)
    assert (f"A batch of {loader} may be half done" in said) is bool(loader)
    assert ("half done" in said) is bool(loader)
    if loader:  # as the error says
        session.run("nbdist.restore('before')", track=False)
        session.run(cell, track=False)
    else:
        session.retry()
    assert session.run(WEIGHTS, track=False).value_list == undisturbed
