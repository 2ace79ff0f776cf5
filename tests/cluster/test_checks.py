"""What goes wrong in a training is said in its cell, once; right trainings are silent."""

from collections.abc import Iterator

import pytest

import nbdist
from tests.cluster import programs
from tests.cluster.conftest import Kernel, SharedCluster


@pytest.fixture(autouse=True, scope="module")
def no_model_is_left(cluster: SharedCluster) -> Iterator[None]:
    """Let the tests that follow find ranks without trained models."""
    yield
    names = "ddp model layout opt one other first second making judging loader parts sampler probe"
    session = cluster.healthy()
    session.run(f"{names.replace(' ', ' = ')} = backward = closure = None", track=False)
    session.run("import gc; gc.collect()", track=False)


def test_what_goes_wrong_is_shown_once_in_its_cell(notebook: Kernel) -> None:
    ran = notebook.cell(programs.WRONG["one rank changes a weight"], "--no-track")
    assert ran.error is None
    (line,) = [line for line in ran.text.splitlines() if "Replicas differ" in line]
    assert "0.weight, rank 1 against rank 0." in line
    assert notebook.cell(programs.RIGHT["ddp"], "--no-track").error is None


def test_replicas_that_stay_apart_are_told_by_the_cell_that_left_them_so(notebook: Kernel) -> None:
    def told(code: str) -> list[str]:
        ran = notebook.cell(code, "--no-track")
        assert ran.error is None
        return [line for line in ran.text.splitlines() if "Replicas differ" in line]

    change = "with torch.no_grad(): model[0].weight[0, 0] = {} * rank"
    assert told(programs.RIGHT["ddp"]) == []
    assert len(told(change.format(1))) == 1
    assert told("print(model)") == []
    assert len(told(change.format(2))) == 1
    assert told(change.format(0)) == []


@pytest.mark.parametrize(
    "name",
    ["DiLoCo", *(pytest.param(n, marks=pytest.mark.slow) for n in ("LocalSGD", "AsyncSGD"))],
)
def test_ranks_that_a_cell_leaves_apart_are_told_at_its_end_and_only_there(
    notebook: Kernel, name: str
) -> None:
    def told(code: str) -> list[str]:
        ran = notebook.cell(code, "--no-track")
        assert ran.error is None
        return [line for line in ran.text.splitlines() if "Ranks end the cell with" in line]

    (line,) = told(programs.left_open(name, is_closed=False))
    assert programs.LEFT_OPEN[name] in line
    assert told("pass") == []
    assert told(programs.left_open(name, is_closed=True)) == []


@pytest.mark.parametrize("name", programs.WRONG)
def test_each_planted_wrong_use_is_named(session: nbdist.Session, name: str) -> None:
    session.run(programs.WRONG[name], track=False)
    first = [alarm for alarm in session.alarms if alarm.startswith(programs.SAYS[name])]
    assert len(first) == 1, session.alarms


@pytest.mark.parametrize("bad", [(1, 2), (8, 9, 10)])
def test_a_loss_that_is_infinite_on_all_ranks_is_told_of_all(
    session: nbdist.Session, bad: tuple[int, ...]
) -> None:
    session.run(programs.infinite_at(bad), track=False, guard=True)
    (alarm,) = session.alarms
    assert "infinite on all ranks " in alarm
    assert alarm.endswith(f" step {bad[0]}.")


@pytest.mark.parametrize("name", programs.RIGHT)
def test_a_right_program_gives_no_alarm(session: nbdist.Session, name: str) -> None:
    session.run(programs.RIGHT[name], track=False)
    assert session.alarms == ()


def test_an_optimizer_that_has_stepped_or_that_a_cell_does_not_name_may_rest_in_it(
    session: nbdist.Session,
) -> None:
    def alarms(*lines: str) -> tuple[str, ...]:
        session.run("\n".join(["for x, y in batches():", *lines]), track=False)
        return session.alarms

    backward = "    F.cross_entropy(model(x), y).backward()"
    session.run(programs.left_idle(), track=False)
    assert alarms(backward, "    model.zero_grad()") == ()
    assert len(alarms(backward, "    opt.zero_grad()")) == 1
    assert alarms(backward, "    opt.step(); opt.zero_grad()") == ()
    assert alarms(backward, "    opt.zero_grad()") == ()


@pytest.fixture
def of_four(session: nbdist.Session) -> Iterator[nbdist.Session]:
    session.scale(4)
    yield session
    session.scale(2)


@pytest.mark.slow
def test_a_replica_of_a_stage_or_a_shard_that_drifts_is_named(of_four: nbdist.Session) -> None:
    for layout in ("pp=2 dp=2", "fsdp=2 tp=2"):
        of_four.run(programs.drift(layout), track=False)
        (alarm,) = of_four.alarms
        # Ranks 2 and 3 have the second stage, or the second shard.
        assert alarm.startswith(
            "Replicas differ at step 10 (equal until step 5): "
            "blocks.3.norm.weight, rank 3 against rank 2."
        )


def test_a_branch_that_depends_on_the_rank_around_a_collective_is_an_error_that_names_both(
    session: nbdist.Session,
) -> None:
    branch = "dist.all_reduce(torch.ones(2)) if rank == 0 else dist.broadcast(torch.ones(2), 0)"
    with pytest.raises(nbdist.RankError) as caught:
        session.run(branch, track=False)
    assert "all_reduce" in str(caught.value)
    assert "broadcast" in str(caught.value)


def test_what_looks_on_is_gone_with_its_cell_so_that_a_new_rank_can_be_given_the_model(
    session: nbdist.Session,
) -> None:
    session.run(programs.RIGHT["ddp"], track=False)
    hooks = (
        "len(model._forward_pre_hooks), [len(p._backward_hooks or ()) for p in model.parameters()]"
    )
    before = session.run(hooks, track=False).value_list
    session.run("fit(model, batches(), sgd(model))", track=False)
    assert session.run(hooks, track=False).value_list == before
    session.restart("1")
    session.run("fit(model, batches(), sgd(model))", track=False)
    sums = session.run("sum(p.sum().item() for p in model.parameters())", track=False).value_list
    assert sums[0] == sums[1]


def test_a_wrapper_that_is_dropped_is_freed_with_its_snapshots(session: nbdist.Session) -> None:
    session.run(programs.RIGHT["local SGD"], track=False)
    session.run("model = None; import gc; gc.collect()", track=False)
    alive = "[type(o).__name__ for o in torch_live.here.live(torch.optim.Optimizer)]"
    found = session.run(f"from nbdist.engine.compat import torch_live; {alive}", track=False)
    assert all("LocalSGD" not in names for names in found.value_list)


GAN = """
from torch.nn import functional as F
torch.manual_seed(0)
made = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
judging = torch.nn.Linear(4, 1)
for one in (made, judging): nbdist.parallelize(one, {layout!r})
first, second = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (made, judging))
for _ in range(4):
    F.softplus(judging(made(torch.ones(4, 6)).detach())).mean().backward()
    second.step(); second.zero_grad()
    loss = F.softplus(-judging(made(torch.ones(4, 6)))).mean()
    loss.backward(); first.step(); first.zero_grad(); second.zero_grad()
loss.item()
"""


def test_a_model_that_a_forward_without_backward_leaves_gathered_is_read_as_shards(
    session: nbdist.Session,
) -> None:
    (expected, _) = session.run(GAN.format(layout="ddp"), track=False).value_list
    assert (
        session.run(GAN.format(layout="zero3"), track=False).value_list
        == [pytest.approx(expected, rel=1e-5)] * 2
    )
    session.run("made = judging = first = second = one = loss = None", track=False)
