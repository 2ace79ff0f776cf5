"""A rank killed in mid step comes back with what it held, and the loop goes on where it stood.

The proof: the parameters at the end are those of the run that nothing broke, bit by bit.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist import RankError, Session
from tests.cluster.test_faults import fail

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
        (OURS, SGD, "before step"),
        ("DDP(net)", ADAM, "before forward"),
        pytest.param("DDP(net)", SGD, "before backward", marks=pytest.mark.slow),
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


PAIRS = """
import os, pathlib, signal
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
FLAG = pathlib.Path({flag!r})
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
mine = pairs[rank // 2]
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(rank // 2)
model = DDP(torch.nn.Linear(3, 3), process_group=mine)
opt = torch.optim.Adam(model.parameters(), lr=0.1)
step = 0
def whole():
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
def summed(group):
    total = torch.tensor(2.0 ** rank)
    dist.all_reduce(total, group=group)
    return total.item()
"""
PAIRS_LOOP = """
while step < 4:
    if rank == 3 and step == {dies} and not FLAG.exists():
        FLAG.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randn(2, 3, generator=generator)).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
    step += 1
dist.barrier()
"""


@pytest.mark.slow
def test_a_model_on_a_group_of_two_and_a_mesh_come_back_with_a_killed_rank(
    session: Session, tmp_path: Path
) -> None:
    session.scale(4)
    begin = PAIRS.format(flag=str(tmp_path / "killed"))
    session.run(begin + PAIRS_LOOP.format(dies=-1), track=False)
    unbroken = session.run("whole()").value_list
    session.run(begin)
    session.run(PAIRS_LOOP.format(dies=2), retry=1, track=False, timeout_s=60)
    assert (tmp_path / "killed").exists(), "the rank was never killed"
    assert session.run("whole()").value_list == unbroken
    assert unbroken[1] != unbroken[2]
    expected = {
        "mine": [3.0, 3.0, 12.0, 12.0],
        "mesh.get_group('tp')": [3.0, 3.0, 12.0, 12.0],
        "mesh['dp'].get_group()": [5.0, 10.0, 5.0, 10.0],
    }
    for group, sums in expected.items():
        assert session.run(f"summed({group})").value_list == sums
    session.scale(2)


ZERO = """
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
model = DDP(torch.nn.Linear(3, 3))
opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
plain = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
def train():
    model(torch.ones(2, 3)).pow(2).mean().backward()
    opt.step()
train()
plain.step()
"""


@pytest.mark.slow
def test_the_lost_states_of_zero_are_said_and_its_step_is_refused_on_every_rank(
    session: Session,
) -> None:
    session.run(ZERO, track=False)
    with pytest.raises(RankError) as killed:
        session.run("import os\nif rank: os.kill(os.getpid(), 9)\ndist.barrier()")
    told = str(killed.value)
    assert "The shards of opt that rank 1 held are lost: build it again" in told
    assert "Rank 1 died with a part of the optimizer of Linear" in told

    with pytest.raises(RankError) as refused:
        session.run("train()", track=False, retry=3)
    told = str(refused.value)
    assert "it uses state that was lost with a rank" in told
    assert "kept their variables" not in told
    assert "The optimizer of Linear cannot step: its states are not whole." in told
    assert "placeholder for torch.distributed.optim" in told
    # The model is whole, and so is what other optimizers have counted.
    session.run("opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)\ntrain()")
    first, second = session.run("[p.tolist() for p in model.parameters()]").value_list
    assert first == second
    counts = "from nbdist.engine.steps import step_state\nstep_state.here().steps[plain].whole"
    assert session.run(counts).value_list == [1, 1]


def test_a_loop_that_counts_from_the_loaders_epoch_comes_as_far_as_it_would_have(
    session: Session,
) -> None:
    session.run(
        "torch.manual_seed(0); model = torch.nn.Linear(1, 1); nbdist.parallelize(model, 'ddp')\n"
        "opt = torch.optim.SGD(model.parameters(), 0.1); broken = [1]; seen = []\n"
        "data = nbdist.loader(torch.arange(8.).reshape(8, 1), global_batch=4, shuffle=False)"
    )
    loop = """
for epoch in range(data.epoch, 2):
    for i, x in enumerate(data):
        model(x).sum().backward()
        if rank and epoch and i and broken: raise ValueError(broken.pop())
        opt.step(); opt.zero_grad(); seen.append((data.epoch, i))
"""
    fail(session, loop)
    session.retry()
    state = "[int(s) for s in (data.epoch, data.consumed)], model.weight.item()"
    first, second = session.run(state).value_list
    assert first == second
    assert first[0] == [2, 0]


@pytest.mark.slow
def test_a_retry_that_comes_to_nothing_leaves_the_next_one_where_it_stood(
    session: Session, tmp_path: Path
) -> None:
    begin = BEGIN.format(flag=str(tmp_path / "flag"), wrap=OURS, optimizer=ADAM, dies=None)
    loop = (
        "if when == 'before the loop': raise ValueError(when)\n"
        "while data.epoch < 2:\n"
        "    for x in data:\n"
        "        if when == 'within' and data.consumed == 30: raise ValueError(when)\n"
        "        model(x).pow(2).mean().backward(); opt.step(); opt.zero_grad()\n"
        "        losses.append(data.consumed)\n"
        "whole(), len(losses)"
    )
    session.run(f"{begin}\nwhen = ''")
    unbroken = session.run(loop, track=False).value_list

    session.run(f"{begin}\nwhen = 'within'")
    fail(session, loop)
    session.push({"when": "before the loop"})
    for _ in range(2):
        with pytest.raises(RankError, match="before the loop"):
            session.retry()
    session.push({"when": ""})
    assert session.retry().value_list == unbroken


def test_a_replacements_loader_follows_the_layout_that_was_made_last(session: Session) -> None:
    layouts = "[nbdist.parallelize(torch.nn.Linear(3, 2), 'ddp') for _ in range(3)]"
    session.run(f"layouts = {layouts}", track=False)
    session.restart("1")
    session.run(
        "net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))\n"
        "layout = nbdist.parallelize(torch.nn.Sequential(net), 'tp=2')\n"
        "first = next(iter(nbdist.loader(torch.randn(8, 8), global_batch=4))).tolist()",
        track=False,
    )
    one, other = session.pull("first")
    assert one == other
    session.run("layouts = layout = net = first = None", track=False)
