"""The first fault of a session: a rank is killed, and the model was made in a cell of its own.

New rank processes in each test: what a process counts or learns when it wraps its first model must
not differ between a rank that did and a replacement that got the model. What comes out is compared
with a computation in one process, which knows nothing of ranks.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from nbdist import RankError, Session
from tests.cluster.conftest import SharedCluster

STEPS = 34

IMPORTS = """
import os, pathlib
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel as DDP
POINTS = torch.randn(160, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
FLAG = pathlib.Path({flag!r})
def die_at(step):
    if rank == 1 and step == {dies!r} and not FLAG.exists():
        FLAG.touch()
        os.kill(os.getpid(), 9)
"""
ANOTHER_MODEL = """
another = nn.Linear(6, 9)
nbdist.parallelize(another, "ddp")
another_opt = torch.optim.SGD(another.parameters(), lr=0.1)
for _ in range(3):
    another(torch.ones(1, 6)).sum().backward(); another_opt.step(); another_opt.zero_grad()
"""
MAKE = """
torch.manual_seed(7)
net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 1))
net.double()
model = {wrap}
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
step = 0
data = nbdist.loader(POINTS, global_batch=4, seed=3)
def train_on(points):
    global step
    die_at(step)
    model(points).pow(2).mean().backward(); opt.step(); opt.zero_grad()
    step += 1
"""
DIE = "die_at('a cell of its own')\ndist.barrier()"
LOOPS = {
    "by hand": f"""
while step < {STEPS}:
    train_on(POINTS[4 * step + 2 * rank:][:2])
""",
    "loader": f"""
for points in data:
    train_on(points)
    if step == {STEPS}:
        break
""",
}
WRAPS = {
    'nbdist.parallelize(net, "ddp")': "(nbdist.parallelize(net, 'ddp'), net)[1]",
    "DDP": "DDP(net)",
    "DDP, small buckets": "DDP(net, bucket_cap_mb=0.0001)",
    "DDP, static_graph": "DDP(net, static_graph=True)",
    "DDP, find_unused_parameters": "DDP(net, find_unused_parameters=True)",
    "DDP, gradient_as_bucket_view": "DDP(net, gradient_as_bucket_view=True)",
    "replicate": "(replicate(net), net)[1]",
}
PLACES = ["a cell of its own", 0, 1, 2, 30]  # of the death: before any step, or in a step


@pytest.fixture
def fresh(cluster: SharedCluster, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Two ranks that have just been started."""
    cluster.stop()
    session = cluster.healthy()
    monkeypatch.chdir(cluster._folder)
    return session


def train(session: Session, loop: str, dies: object) -> None:
    """Train to the last step; the cell that the death ends is run again."""
    if dies == PLACES[0]:
        with pytest.raises(RankError, match="killed by SIGKILL"):
            session.run(DIE, timeout_s=60)
    elif loop == "by hand":
        with pytest.raises(RankError, match="killed by SIGKILL"):
            session.run(LOOPS[loop], timeout_s=60, track=False)
    session.run(LOOPS[loop], timeout_s=60, track=False, retry=1 if loop == "loader" else 0)


def whole(session: Session, name: str) -> list[float]:
    """Return a model's parameters, which are the same on both ranks."""
    first, second = session.run(
        f"torch.cat([p.detach().flatten() for p in {name}.parameters()]).tolist()"
    ).value_list
    assert first == second
    return list(first)


def parts(session: Session, loop: str) -> Callable[[int], list[torch.Tensor]]:
    """Return the two ranks' parts of each step's batch."""
    if loop == "by hand":
        points = torch.randn(
            160, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
        return lambda step: [points[4 * step + 2 * rank :][:2] for rank in range(2)]
    # Another loader of the same seed, of which nothing was lost.
    told = session.run(
        "[points.tolist() for points in nbdist.loader(POINTS, global_batch=4, seed=3)]"
    ).value_list
    return lambda step: [torch.tensor(batches[step], dtype=torch.float64) for batches in told]


def in_one_process(batches: Callable[[int], list[torch.Tensor]]) -> torch.Tensor:
    """Return the parameters after all steps: the mean of two gradients each, nothing else."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 1))
    net.double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        for points in batches(step):
            (net(points).pow(2).mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def cases() -> list[object]:
    """All deaths for what users write most, alone and beside another model; else the plain loop."""
    often = list(WRAPS)[:2]
    always = {
        (often[0], "a cell of its own", "by hand", False),
        (often[0], 30, "loader", False),
        ("DDP, static_graph", 1, "by hand", False),
    }
    every = [
        (wrap, dies, loop, beside)
        for wrap in WRAPS
        for dies in PLACES
        for loop in (LOOPS if wrap in often else ["by hand"])
        for beside in ([False, True] if wrap in often else [False])
    ]
    assert always <= set(every)
    return [
        pytest.param(
            *case,
            marks=() if case in always else (pytest.mark.slow,),
            id=f"{case[0]}, {case[1]}, {case[2]}{', beside another' if case[3] else ''}",
        )
        for case in every
    ]


@pytest.mark.parametrize(("wrap", "dies", "loop", "is_beside"), cases())
def test_training_goes_on_as_if_the_first_rank_to_die_had_lived(
    fresh: Session, tmp_path: Path, wrap: str, dies: object, loop: str, is_beside: bool
) -> None:
    flag = tmp_path / "died"
    fresh.run(IMPORTS.format(flag=str(flag), dies=dies) + ANOTHER_MODEL * is_beside)
    fresh.run(MAKE.format(wrap=WRAPS[wrap]))
    another = whole(fresh, "another") if is_beside else []

    train(fresh, loop, dies)

    assert flag.exists(), "the rank was never killed"
    assert fresh.run("step").value_list == [STEPS] * 2
    alone = in_one_process(parts(fresh, loop))
    torch.testing.assert_close(
        torch.tensor(whole(fresh, "net"), dtype=torch.float64), alone, rtol=1e-12, atol=1e-14
    )
    assert another == (whole(fresh, "another") if is_beside else [])


SPREAD = """
from nbdist import Pipeline
torch.manual_seed(7)
net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 2))
x, y = torch.ones(4, 6), torch.ones(4, 2)
layout = nbdist.parallelize(net, {layout})
{optimizer}
def train(steps):
    for _ in range(steps):
        if layout.name == "pp=2":
            layout.step(x, y, nn.functional.mse_loss)
        else:
            nn.functional.mse_loss(net(x), y).backward()
        opt.step(); opt.zero_grad()
"""
OWN = "opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)"
SHARDED = {
    '"zero1"': "opt = layout.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)",
    '"zero2"': OWN,
    '"zero3"': OWN,
    '"tp=2"': OWN,
    '"pp=2", Pipeline("1f1b", 2)': OWN,
}


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("layout", SHARDED)
def test_layouts_whose_state_died_with_the_rank_are_refused_in_words(
    fresh: Session, tmp_path: Path, layout: str, steps: int
) -> None:
    fresh.run(IMPORTS.format(flag=str(tmp_path / "died"), dies=PLACES[0]))
    fresh.run(SPREAD.format(layout=layout, optimizer=SHARDED[layout]))
    fresh.run(f"train({steps})", track=False)
    with pytest.raises(RankError, match="killed by SIGKILL"):
        fresh.run(DIE, timeout_s=60)

    with pytest.raises(RankError, match=r"are lost|not whole|died with it"):
        fresh.run("train(1)", timeout_s=60, track=False)
