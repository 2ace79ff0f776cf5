"""A rank killed in mid step comes back with what it held, and the loop goes on where it stood.

The proof: the parameters at the end are those of the run that nothing broke, bit by bit.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist import Session

BEGIN = """
import os, pathlib, signal
from torch.nn.parallel import DistributedDataParallel as DDP
FLAG = pathlib.Path({flag!r})
torch.manual_seed(7)
net = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
model = {wrap}
opt = {optimizer}
plan = torch.optim.lr_scheduler.StepLR(opt, 4, 0.5)
points = torch.randn(72, 3, generator=torch.Generator().manual_seed(1))
data = nbdist.loader(points, global_batch=6, seed=3)
losses = []
def die(where, step):
    if rank == 1 and (where, step) == {dies!r} and not FLAG.exists():
        FLAG.touch()
        os.kill(os.getpid(), signal.SIGKILL)
def whole():
    return torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()
"""
LOOP = """
for x in data:
    step = data.consumed // 6
    die("before forward", step)
    loss = model(x).pow(2).mean()
    die("before backward", step)
    loss.backward()
    die("before step", step)
    opt.step()
    opt.zero_grad()
    die("after step", step)
    plan.step()
    losses.append(step)
"""
SGD = "torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)"
ADAM = "torch.optim.Adam(net.parameters(), lr=0.01)"
OURS = "(nbdist.parallelize(net, 'ddp'), net)[1]"


@pytest.fixture
def trio(session: Session) -> Iterator[Session]:
    """Three ranks, and two again afterwards, as the other tests expect."""
    session.scale(3)
    yield session
    if session.is_running:
        session.scale(2)


def train(session: Session, flag: Path, wrap: str, optimizer: str, dies: object) -> list[float]:
    """Train on all ranks, with one retry; return rank 0's parameters after checking them all."""
    begin = BEGIN.format(flag=str(flag), wrap=wrap, optimizer=optimizer, dies=dies)
    session.run(begin)
    session.run(LOOP, retry=1, track=False, timeout_s=60)
    first, *others = session.run("whole()").value_list
    assert all(other == first for other in others)
    # Every step once, on every rank.
    assert session.run("losses").value_list == [list(range(1, 13))] * 3
    return list(first)


@pytest.mark.parametrize(
    ("wrap", "optimizer", "where"),
    [
        ("DDP(net)", SGD, "before backward"),
        (OURS, SGD, "before step"),
        ("DDP(net)", ADAM, "before forward"),
        pytest.param("DDP(net)", SGD, "after step", marks=pytest.mark.slow),
        pytest.param("DDP(net)", SGD, "before forward", marks=pytest.mark.slow),
        pytest.param("DDP(net)", ADAM, "before step", marks=pytest.mark.slow),
        pytest.param("DDP(net)", ADAM, "after step", marks=pytest.mark.slow),
        pytest.param(OURS, SGD, "after step", marks=pytest.mark.slow),
        pytest.param(OURS, ADAM, "before backward", marks=pytest.mark.slow),
    ],
)
def test_a_rank_killed_in_mid_step_changes_no_bit_of_the_result(
    trio: Session, tmp_path: Path, wrap: str, optimizer: str, where: str
) -> None:
    unbroken = train(trio, tmp_path / "unbroken", wrap, optimizer, None)
    broken = train(trio, tmp_path / "broken", wrap, optimizer, (where, 5))
    assert (tmp_path / "broken").exists(), "the rank was never killed"
    assert broken == unbroken
