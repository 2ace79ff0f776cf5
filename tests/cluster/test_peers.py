"""A rank that held a part of a model is killed: its part comes back, from whoever has it.

The proof: the parameters at the end are those of the run that nothing broke, bit by bit.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nbdist
from nbdist import Session
from tests.cluster.conftest import LONGEST_S, ROOT, Kernel, SharedCluster
from tests.cluster.test_faults import fail

BEGIN = """
import os, pathlib, signal
FLAG = pathlib.Path({flag!r})
torch.manual_seed(0)
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 12), torch.nn.Linear(12, 6)
        self.drop = torch.nn.Dropout({dropout})
    def forward(self, x):
        return x + self.down(self.drop(self.up(x).tanh()))
model = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(6, 5))
{freeze}
layout = nbdist.parallelize(model, {layout!r})
trained = [p for p in model.parameters() if p.requires_grad]
opt = layout.optimizer(torch.optim.{optimizer}, {parameters}lr=0.05)
plan = torch.optim.lr_scheduler.StepLR(opt, 4, 0.5)
data = torch.randn(96, 6, generator=torch.Generator().manual_seed(5))
train = nbdist.loader(data, global_batch=8, seed=3)
made = 0
torch.manual_seed(7 + rank // {alike})
def die(at):
    if rank in {dies} and made == at:
        mark = FLAG.with_name(f"{{FLAG.name}}{{rank}}")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
def parts():
    own = lambda p: p.to_local() if hasattr(p, "to_local") else p
    return [own(p).tolist() for p in model.parameters()]
"""
SECOND_DEATH = """
made = 8
FLAG = FLAG.with_name("again")
def die(at):
    if rank == 1 and made == 10 and not FLAG.exists():
        FLAG.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""
PIPELINED = """
for x in train:
    layout.step(x, x, lambda out, _: out.pow(2).mean())
    made += 1
    die(9)
    opt.step(); opt.zero_grad(); plan.step()
parts()
"""
LOOP = """
for x in train:
    model(x).pow(2).mean().backward()
    made += 1
    die(9)
    opt.step(); opt.zero_grad(); plan.step()
parts()
"""


@pytest.fixture(scope="module")
def four(
    cluster: SharedCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, Session]]:
    """Return a place for one cluster of four ranks, by its `peer_snapshots`."""
    cluster.stop()
    made: dict[int, Session] = {}
    yield made
    for session in made.values():
        session.stop()


@pytest.fixture
def start(
    four: dict[int, Session],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """Return a function that gives four ranks which keep snapshots every so many steps."""

    def start(every: int) -> Session:
        if every not in four or not four[every].is_running:
            for other in four.values():
                other.stop()
            four.clear()
            monkeypatch.chdir(tmp_path_factory.mktemp("peers"))
            monkeypatch.setenv("PYTHONPATH", str(ROOT))
            four[every] = nbdist.start(n=4, device="cpu", peer_snapshots=every)
        return four[every]

    return start


def begin(flag: Path, layout: str, dies: tuple[int, ...], **options: Any) -> str:
    """Return the cell that makes the model and what trains it."""
    of_all = {"freeze": "", "parameters": "", "dropout": 0.0, "alike": 1}
    of_all |= {"optimizer": "Adam", **options}
    return BEGIN.format(flag=str(flag), layout=layout, dies=dies, **of_all)


def train(
    session: Session, flag: Path, layout: str, dies: tuple[int, ...] = (), **options: Any
) -> list[Any]:
    """Train with one retry a death, and return each rank's parts of the parameters."""
    session.run(begin(flag, layout, dies, **options))
    loop = PIPELINED if "pp" in layout else LOOP
    return list(session.run(loop, retry=1, track=False, timeout_s=100).value_list)


def compare(
    session: Session, folder: Path, layout: str, dies: tuple[int, ...], **options: Any
) -> None:
    unbroken = train(session, folder / "unbroken", layout, **options)
    broken = train(session, folder / "broken", layout, dies, **options)
    assert sorted(p.name for p in folder.iterdir()) == [f"broken{rank}" for rank in dies]
    assert broken == unbroken


@pytest.mark.parametrize(
    ("layout", "dies", "options"),
    [
        pytest.param("dp=2 fsdp=2", (1,), {}, marks=pytest.mark.slow),
        # The other rank of tp tells what is dropped.
        ("dp=2 tp=2", (0, 3), {"dropout": 0.3, "alike": 2}),
        pytest.param("pp=2 dp=2", (1,), {}, marks=pytest.mark.slow),
        pytest.param("dp=2 fsdp=2", (2, 3), {}, marks=pytest.mark.slow),
        pytest.param("dp=2 fsdp=2", (1,), {"optimizer": "Adafactor"}, marks=pytest.mark.slow),
    ],
)
def test_what_a_living_rank_holds_too_comes_from_there_and_no_bit_differs(
    start: Any, tmp_path: Path, layout: str, dies: tuple[int, ...], options: dict[str, Any]
) -> None:
    compare(start(0), tmp_path, layout, dies, **options)


@pytest.mark.slow
def test_it_is_said_who_held_the_same_part(start: Any, tmp_path: Path) -> None:
    session = start(0)
    session.run(begin(tmp_path / "flag", "dp=2 fsdp=2", (1,)))
    told = fail(session, LOOP, track=False)
    assert (
        "The part of Sequential that died was copied from a rank that holds the same: rank 1's "
        "from rank 3."
    ) in told
    assert "lost" not in told


@pytest.mark.slow
def test_a_part_that_only_the_dead_rank_held_is_lost_and_the_error_says_what_prevents_it(
    start: Any, tmp_path: Path
) -> None:
    session = start(0)
    with pytest.raises(nbdist.RankError) as lost:
        train(session, tmp_path / "flag", "zero3", (1,))
    told = str(lost.value)
    assert "Rank 1 died with a part of Sequential, of which there is no second copy." in told
    assert "`%dist start --peer-snapshots 10` keeps each rank's part in another rank's memory" in (
        told
    )


@pytest.mark.parametrize(
    ("layout", "dies", "options"),
    [
        # Adafactor steps on whole matrices.
        ("zero3", (1,), {"optimizer": "Adafactor"}),
        pytest.param("zero3", (1,), {"dropout": 0.3}, marks=pytest.mark.slow),
        pytest.param("tp=4", (2,), {}, marks=pytest.mark.slow),
        pytest.param("zero1", (1,), {"dropout": 0.3}, marks=pytest.mark.slow),
        pytest.param("fsdp=2 tp=2", (0, 2), {}, marks=pytest.mark.slow),
        pytest.param(
            "zero3",
            (3,),
            {"freeze": "model[0].requires_grad_(False)", "parameters": "params=trained, "},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_no_living_rank_holds_comes_from_a_peers_memory_and_no_bit_differs(
    start: Any, tmp_path: Path, layout: str, dies: tuple[int, ...], options: dict[str, Any]
) -> None:
    compare(start(3), tmp_path, layout, dies, **options)


@pytest.mark.slow
def test_the_rank_that_kept_a_part_dies_and_then_the_rank_whose_part_it_was(
    start: Any, tmp_path: Path
) -> None:
    """What a peer has lost it gets again at the first step after the recovery."""
    session = start(3)
    unbroken = train(session, tmp_path / "unbroken", "zero3")
    session.run(begin(tmp_path / "broken", "zero3", (2,)))
    fail(session, LOOP, track=False)
    session.run(SECOND_DEATH, track=False)
    broken = session.run(LOOP, go_on=True, retry=1, track=False, timeout_s=100).value_list
    assert (tmp_path / "again").exists()
    assert list(broken) == unbroken


@pytest.mark.slow
def test_it_is_said_how_far_all_went_back_and_from_whose_memory_the_part_came(
    start: Any, tmp_path: Path
) -> None:
    session = start(3)
    session.run(begin(tmp_path / "flag", "zero3", (1,)))
    told = fail(session, LOOP, track=False)
    # Snapshots are of steps 1, 4 and 7; at the end of step 8 all wait until the last is whole.
    # The step that rank 1 did not end the others may have made.
    assert re.search(
        "Rank 1 died with a part of Sequential, which lay in a peer's memory: all ranks went back "
        "(1 step|2 steps), to step 7, and took rank 1's part from rank 2.",
        told,
    )
    assert "its random state is its own" in told


@pytest.mark.slow
def test_a_part_whose_optimizer_is_held_beside_what_is_lost_is_refused_and_the_cluster_lives(
    start: Any, tmp_path: Path
) -> None:
    session = start(3)
    kept = "\nshadow = opt, [p.detach().clone() for p in model.parameters()]\ndel opt, plan\n"
    loop = LOOP.replace("opt.", "shadow[0].").replace(" plan.step()", "")
    session.run(begin(tmp_path / "flag", "zero3", (1,)) + kept)
    told = fail(session, loop, track=False)
    assert "A part that a peer had kept for rank 1 could not be given back" in told
    with pytest.raises(nbdist.RankError, match="its state is not whole"):
        session.run("model(torch.ones(2, 6))", track=False)
    assert session.run("1 + 1").value_list == [2] * 4


def test_a_ranks_own_small_values_come_back_and_what_was_too_large_is_named(
    start: Any,
) -> None:
    session = start(3)
    session.run(
        "best = {'loss': 0.5 + rank, 'at': (rank, 'epoch')}\n"
        "scale = torch.full((3,), float(rank))\n"
        "huge = torch.full((400_000,), float(rank))\n"
        "count = 0",
        track=False,
    )
    told = fail(
        session,
        "import os\ncount += 1\nif rank == 2: os.kill(os.getpid(), 9)\ndist.barrier()",
        track=False,
    )

    found = session.run("best, scale.tolist(), count, huge[0].item()", track=False).value_list
    assert found[2] == ({"loss": 2.5, "at": (2, "epoch")}, [2.0] * 3, 1, 0.0)
    assert found[:2] + found[3:] == [
        ({"loss": 0.5 + rank, "at": (rank, "epoch")}, [float(rank)] * 3, 1, float(rank))
        for rank in (0, 1, 3)
    ]
    assert "It has its own best, scale again, as when the last cell ended." in told
    assert "Rank 2 has rank 0's huge: what it had itself was too large to be kept" in told


@pytest.mark.slow
def test_a_rank_and_the_peer_that_kept_its_part_are_lost_together(
    start: Any, tmp_path: Path
) -> None:
    session = start(3)
    with pytest.raises(nbdist.RankError) as lost:
        train(session, tmp_path / "flag", "zero3", (1, 2))
    assert "Ranks 1-2 died with a part of Sequential" in str(lost.value)


KILLED_ONCE = """
for x in train:
    model(x).pow(2).mean().backward()
    made += 1
    die(9)
    opt.step(); opt.zero_grad(); plan.step()
print("whole:", sum(p.full_tensor().double().sum().item() for p in model.parameters()))
"""


def test_in_a_notebook_a_retried_cell_ends_as_if_no_rank_had_been_killed(
    kernel: Kernel, tmp_path: Path
) -> None:
    kernel.run("%load_ext nbdist")
    kernel.run("%dist stop")
    try:
        start = "%dist start -n 2 --device cpu --peer-snapshots 3"
        assert "Started 2 ranks" in kernel.run(start, timeout_s=2 * LONGEST_S).text
        ends = []
        for flag, dies in (("unbroken", ()), ("broken", (1,))):
            made = kernel.cell(begin(tmp_path / flag, "zero3", dies, dropout=0.2), "--no-track")
            assert made.error is None
            ran = kernel.cell(KILLED_ONCE, "--retry 1 --no-track", timeout_s=2 * LONGEST_S)
            assert ran.error is None, ran.error
            ends.append(set(re.findall(r"whole: \S+", ran.text)))
        cost = kernel.run("%dist status --cost").text
    finally:
        kernel.run("%dist stop")

    assert (tmp_path / "broken1").exists()
    assert len(ends[0]) == 1
    assert ends[0] == ends[1]
    assert "keeps snapshots in peers' memory" in cost
