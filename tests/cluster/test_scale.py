"""More and fewer ranks while the notebook goes on."""

import itertools
from collections.abc import Iterator

import pytest

from nbdist import RankError, Session, StartError, UsageError
from tests.cluster.conftest import Kernel
from tests.cluster.test_faults import assert_usable, fail

SUM = "_s = torch.ones(1); dist.all_reduce(_s); _s.item()"

BEGIN = """
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.device_mesh import init_device_mesh
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
layout = nbdist.parallelize(model, "ddp")
opt = torch.optim.Adam(model.parameters(), lr=0.1)
data = nbdist.loader(torch.arange(24.).reshape(12, 2), global_batch=4, shuffle=False)
kept = id(model), id(opt)
def train(steps):
    seen = []
    for x, _ in zip(data, range(steps)):
        seen += x[:, 0].tolist()
        model(x).mean().backward(); opt.step(); opt.zero_grad()
    return seen
def whole():
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
"""
OWN = """
wrapped = DDP(torch.nn.Linear(2, 1))
half = dist.new_group([0, 1])
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
cut = torch.nn.Linear(2, 2)
nbdist.parallelize(cut, "zero3")
shared = torch.nn.Linear(2, 2)
nbdist.parallelize(shared, "zero1")
"""


@pytest.fixture
def scaled(session: Session) -> Iterator[Session]:
    """A session of two ranks, and again two afterwards."""
    yield session
    if session.is_running:
        session.scale(2)


def test_fewer_ranks_keep_what_they_hold_and_train_on(scaled: Session) -> None:
    scaled.run(BEGIN + "train(1)", track=False)
    said = scaled.scale(1)
    assert said[0] == "There is 1 rank now."
    assert [line.rank for line in scaled.status().ranks] == [0]
    assert scaled.status().summary.startswith("1 rank on cpu")
    names = (
        "import os; (rank, world_size, os.environ['WORLD_SIZE'], os.environ['LOCAL_WORLD_SIZE'])"
    )
    assert scaled.run(names).value_list == [(0, 1, "1", "1")]
    assert scaled.run("(id(model), id(opt)) == kept").value_list == [True]
    assert scaled.run("repr(layout)[:18]").value_list == ["<Layout ddp (dp=1)"]
    # The loader gives this rank the whole of each batch now.
    assert scaled.run("train(1)", track=False).value_list == [[0.0, 2.0, 4.0, 6.0]]


def test_weights_of_a_loader_are_asked_for_anew(scaled: Session) -> None:
    scaled.run("weighted = nbdist.loader(torch.arange(12.), global_batch=4, weights=[1, 0.3])")
    scaled.scale(1)
    told = fail(scaled, "for x in weighted: pass")
    assert "The loader has 2 weights, and a batch has 1 part." in told
    assert "loader.weights = [1]" in told
    scaled.run("weighted.weights = None")
    assert scaled.run("[len(x) for x in weighted]").value_list == [[4] * 3]


def test_more_ranks_meet_in_one_group_and_know_their_number(scaled: Session) -> None:
    assert scaled.scale(3)[0] == "There are 3 ranks now."
    assert scaled.run(SUM).value_list == [3.0] * 3
    names = "import os; (rank, world_size, os.environ['RANK'], os.environ['WORLD_SIZE'])"
    assert scaled.run(names).value_list == [(r, 3, str(r), "3") for r in range(3)]
    # A fault, and a death, are settled as ever.
    fail(scaled, "if rank == 2: raise ValueError\ndist.barrier()")
    fail(scaled, "import os\nif rank == 2: os._exit(3)\ndist.barrier()")
    assert scaled.run(SUM).value_list == [3.0] * 3


def test_new_ranks_hold_what_the_others_hold_and_train_with_them(scaled: Session) -> None:
    scaled.run(BEGIN + "train(1)", track=False)
    said = " ".join(scaled.scale(3))
    assert "cloned from rank 0" in said
    # The global batch is what it was, in three parts now.
    parts = scaled.run("train(1)", track=False).value_list
    assert parts == [[0.0, 2.0], [4.0], [6.0]]
    first, *others = scaled.run("whole()").value_list
    assert others == [first, first]


def test_what_differs_between_ranks_is_named_and_replicas_that_were_cloned_are_not(
    scaled: Session,
) -> None:
    own = "\norder = torch.randperm(9, generator=torch.Generator().manual_seed(rank))\n"
    scaled.run(BEGIN + own + "train(1)\nfor x in data: seen = model(x)\ndel kept", track=False)
    scaled.scale(3)
    said = scaled.scale(4)  # rank 2's model is a clone
    (line,) = [line for line in said if line.startswith("These differ")]
    assert line.startswith(
        "These differ between ranks, and rank 3 has rank 0's: order. Create them"
    )
    scaled.run("del order, seen, x")


def test_what_stands_on_the_old_groups_is_named_and_refused(scaled: Session) -> None:
    scaled.run(BEGIN + OWN)
    said = scaled.scale(1)[-1]
    own = ("wrapped (", "half (process group)", "mesh (mesh)")
    for name in (*own, 'cut (layout "zero3")', 'shared (layout "zero1")'):
        assert name in said
    assert "model" not in said
    x = "torch.ones(1, 2)"
    for use in (
        *(f"wrapped({x})", f"cut({x})", f"shared({x})", f"dist.all_reduce({x}, group=half)"),
        f"dist.all_reduce({x}, group=mesh.get_group())",
    ):
        assert "ClusterError: This " in fail(scaled, use)
    again = " ".join(scaled.scale(2))
    assert "half (process group)" not in again  # named once
    assert "half (" in again  # for the replacement, a placeholder
    scaled.run("del wrapped, half, mesh, cut, shared")


@pytest.mark.slow
def test_a_trained_layout_that_cannot_follow_is_refused_everywhere_and_all_else_goes_on(
    scaled: Session,
) -> None:
    scaled.run(
        BEGIN
        + """
left = nbdist.parallelize(torch.nn.Linear(2, 1), "zero1")
its = left.optimizer(torch.optim.Adam, lr=0.1)
batch = torch.ones(2, 2), torch.ones(2, 1), torch.nn.functional.mse_loss
left.step(*batch); its.step()
wrapped = DDP(torch.nn.Linear(2, 1))
train(1)
""",
        track=False,
    )
    said = " ".join(scaled.scale(3))
    assert 'left (layout "zero1"), wrapped (DistributedDataParallel)' in said
    assert "DistributedDataParallel: it belongs to a process group that no longer exists" in said
    told = fail(scaled, "left.step(*batch)")
    assert "3 of 3 ranks failed" in told
    assert 'ClusterError: This model with the layout "zero1" belongs to a process group' in told
    assert scaled.run("left.name, left.shape.dp").value_list == [("zero1", 2)] * 3
    told = fail(scaled, "left.optimizer(torch.optim.SGD, lr=0.1)")
    assert 'This "zero1" was made for 2 ranks, and now there are 3.' in told
    fail(scaled, "import os\nif rank == 1: os._exit(3)\ndist.barrier()")
    assert scaled.run("train(1)", track=False).value_list == [[0.0, 2.0], [4.0], [6.0]]
    first, *others = scaled.run("whole()").value_list
    assert others == [first, first]
    # A replacement copies models as the others do.
    scaled.run("import copy; copies = [copy.deepcopy(m) for m in (model, left.model)]")
    of_copies = "[(type(m).__name__, [p.tolist() for p in m.parameters()]) for m in copies]"
    first, *others = scaled.run(of_copies).value_list
    assert [name for name, _ in first] == ["Sequential", "Linear"]
    assert others == [first, first]
    scaled.run("del left, its, wrapped, copies")


def test_ranks_that_do_not_come_up_leave_the_others_as_they_were(scaled: Session) -> None:
    scaled.run("held = rank")
    native = scaled._cluster._engine_spec
    scaled._cluster._engine_spec = lambda rank, n: {"rank": rank}
    with pytest.raises(StartError, match=r"(?s)Rank 2 did not start; the cluster is unchanged"):
        scaled.scale(3)
    scaled._cluster._engine_spec = native
    assert scaled.run("held").value_list == [0, 1]
    assert_usable(scaled)
    assert scaled.scale(3)[0] == "There are 3 ranks now."


def test_the_same_number_changes_nothing(scaled: Session) -> None:
    generation = scaled._cluster.group.generation
    assert scaled.scale(2) == ("There are 2 ranks already.",)
    assert scaled._cluster.group.generation == generation


def test_a_number_that_makes_no_sense_is_refused(scaled: Session) -> None:
    with pytest.raises(UsageError, match="at least 1 rank, not 0"):
        scaled.scale(0)


def test_the_magic_tells_what_it_did(notebook: Kernel) -> None:
    assert "There is 1 rank now." in notebook.run("%dist scale 1").text
    told = notebook.run("%dist scale two").error
    assert told is not None
    assert "%dist scale" in told[2]
    assert "There are 2 ranks now." in notebook.run("%dist scale 2").text
    ran = notebook.cell("print(world_size)")
    assert "ranks 0-1 │ 2" in ran.text


def test_a_dead_rank_is_replaced_before_the_number_changes(scaled: Session) -> None:
    with pytest.raises(RankError):
        scaled.run("import os\nif rank: os._exit(3)\ndist.barrier()")
    assert scaled.scale(1)[0] == "There is 1 rank now."


def test_a_cell_that_failed_is_run_again_on_all_ranks_of_now(scaled: Session) -> None:
    cell = """
for x in data:
    if len(seen) >= 2 and world_size == 2: raise ValueError("stop here")
    model(x).mean().backward(); opt.step(); opt.zero_grad()
    seen += x[:, 0].tolist()
"""
    for n in (3, 1):
        scaled.scale(2)
        scaled.run(f"{BEGIN}seen = []", track=False)
        with pytest.raises(RankError, match="stop here"):
            scaled.run(cell, track=False)
        first = scaled.pull("seen")
        scaled.scale(n)
        assert len(scaled.retry()) == n
        # What a rank has seen before is cloned to new ones.
        later = [seen[len(first[0]) :] for seen in scaled.pull("seen")]
        assert sorted(itertools.chain(*first, *later)) == [2.0 * i for i in range(12)]


def test_a_fault_after_it_leaves_scripts_the_group_of_now(scaled: Session) -> None:
    scaled.scale(1)
    scaled.scale(2)
    fail(scaled, "1 / 0")
    scaled.run("""
        from datetime import timedelta
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    """)
    assert scaled.run(SUM).value_list == [2.0] * 2


def test_a_new_rank_runs_the_hooks_of_an_optimizer_also_where_its_scheduler_came_first(
    scaled: Session,
) -> None:
    scaled.run("""
        from torch.optim.lr_scheduler import LambdaLR
        from torch.optim.optimizer import register_optimizer_step_post_hook
        other = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(2, 1), process_group=dist.new_group([0, 1])
        )
        beside = torch.optim.SGD(other.parameters(), lr=0.1)
        plan = LambdaLR(beside, lambda epoch: 0.9)
        model = nbdist.parallelize(torch.nn.Linear(2, 1), "ddp").model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = LambdaLR(optimizer, lambda epoch: 0.9)
        def train():
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step(); optimizer.zero_grad(); schedule.step()
        train()
    """)
    scaled.scale(3)
    scaled.run("""
        stepped = []
        handle = register_optimizer_step_post_hook(lambda *_: stepped.append(1)); train()
    """)
    assert scaled.run("handle.remove(); len(stepped)").value_list == [1, 1, 1]


@pytest.mark.slow
def test_a_new_rank_comes_where_a_layout_is_left_whose_ranks_draw_alike(scaled: Session) -> None:
    scaled.run("""
        parts = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        left = nbdist.parallelize(parts, "tp=2")
    """)
    scaled.scale(3)  # rank 2 has no neighbour, as rank 3 would be
    assert scaled.run(SUM).value_list == [3.0] * 3
    fail(
        scaled,
        "import os, signal\nif rank == 2: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()",
    )
    assert scaled.run(SUM).value_list == [3.0] * 3
