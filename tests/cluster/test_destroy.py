"""Programs that destroy the default process group, as the last line of many tutorials does."""

import pytest

from nbdist import Session
from tests.cluster.test_faults import fail
from tests.cluster.test_repair import kill

SUM = "_s = torch.ones(1); dist.all_reduce(_s); _s.item()"
TRAIN = """
from torch.nn.parallel import DistributedDataParallel as DDP
net = torch.nn.Linear(2, 1)
ddp = DDP(net)
ddp(torch.ones(1, 2)).sum().backward()
"""
DESTROY = "dist.destroy_process_group()"


def assert_sums(session: Session) -> None:
    assert session.run(SUM).value_list == [2.0, 2.0]


@pytest.mark.parametrize("ranks", [pytest.param("all", marks=pytest.mark.slow), "1"])
def test_after_a_cell_that_destroyed_the_group_the_next_one_finds_another(
    session: Session, ranks: str
) -> None:
    session.run(TRAIN + "half = dist.new_group([0, 1])")
    session.run(DESTROY, ranks)
    assert_sums(session)
    told = fail(session, "ddp(torch.ones(1, 2))")
    assert "This DistributedDataParallel belongs to a process group that no longer exists" in told
    assert "the program destroyed it" in told
    session.run("ddp = DDP(net); ddp(torch.ones(1, 2)).sum().backward()")
    # No name of a group is used again.
    numbers = [int(name) for name in session.run("dist.group.WORLD.group_name").value_list]
    assert numbers[0] == numbers[1] > 1
    fail(session, "if rank: raise ValueError\ndist.barrier()")
    session.run("ddp(torch.ones(1, 2)).sum().backward()")
    kill(session, 1)
    assert_sums(session)


@pytest.mark.slow
def test_a_rank_that_is_killed_after_it_destroyed_the_group_is_replaced(session: Session) -> None:
    session.run("held = 40")
    told = fail(session, f"import os\n{DESTROY}\nif rank: os._exit(3)")
    assert "The cell destroyed the process group; it was re-created." in told
    assert session.run("held").value_list == [40, 40]
    assert_sums(session)
    session.run(DESTROY)
    assert session.restart("1")
    assert_sums(session)
    session.run(DESTROY)
    session.scale(3)
    assert session.run(SUM).value_list == [3.0] * 3
    session.run(DESTROY)
    kill(session, 2)
    session.scale(2)
    assert_sums(session)


def test_a_program_that_initialises_it_again_keeps_its_own(session: Session) -> None:
    session.run(TRAIN + DESTROY + "\ndist.init_process_group('gloo'); mine = dist.group.WORLD")
    assert session.run("mine is dist.group.WORLD").value_list == [True, True]
    assert_sums(session)
    session.run("again = DDP(net); again(torch.ones(1, 2)).sum().backward()")
    fail(session, "if rank: raise ValueError\ndist.barrier()")
    assert session.run("mine is dist.group.WORLD").value_list == [True, True]
    session.run("again(torch.ones(1, 2)).sum().backward()")
    assert "the program destroyed it" in fail(session, "ddp(torch.ones(1, 2))")
    kill(session, 0)
    assert_sums(session)


def test_a_layout_with_dp_alone_follows_to_the_new_group(session: Session) -> None:
    session.run(
        "torch.manual_seed(0); model = torch.nn.Linear(2, 1)\n"
        "nbdist.parallelize(model, 'ddp'); opt = torch.optim.SGD(model.parameters(), 0.1)\n"
        "def step():\n"
        "    model(torch.ones(1, 2) * rank).sum().backward(); opt.step(); opt.zero_grad()\n"
        "    return model.weight.tolist()\n"
        f"step(); {DESTROY}",
        track=False,
    )
    first, second = session.run("step()", track=False).value_list
    assert first == second


def test_a_group_may_go_while_a_collective_is_under_way(session: Session) -> None:
    """The reducer holds the group last, and is freed with Python's lock held."""
    session.run(
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "def train():\n"
        "    ddp = DDP(torch.nn.Linear(4, 1)); ddp(torch.ones(2, 4)).sum().backward()\n"
        "    work = dist.all_reduce(torch.ones(20_000_000), async_op=True)\n"
        f"    {DESTROY}\n"
        "    del work\n"
        "train()",
        timeout_s=60,
    )
    assert_sums(session)
