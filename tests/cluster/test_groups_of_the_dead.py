"""A group whose members have all died works again, or its next use is an error."""

import pytest

from nbdist import NBDistError, RankError, Session

DIE = "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
SUM = "t = torch.ones(1) * (rank + 1)\nif rank == 1: dist.all_reduce(t, group=own)\nt.item()"


def test_a_group_that_the_dead_rank_alone_was_in_is_formed_again(session: Session) -> None:
    session.run("own = dist.new_group([1])")
    session.run("again = own")  # a name of another cell
    with pytest.raises(RankError):
        session.run(DIE)

    assert session.run(SUM).value_list == [1.0, 2.0]
    ranks = "dist.get_process_group_ranks(again) if rank else again"
    assert session.run(ranks).value_list == [-100, [1]]


def test_one_that_was_made_in_the_cell_that_failed_is_a_placeholder(session: Session) -> None:
    with pytest.raises(RankError) as killed:
        session.run(f"own = dist.new_group([1])\n{DIE}")
    assert "create again if needed:" in str(killed.value)
    assert "own (a process group that rank 0 is not in" in str(killed.value)

    with pytest.raises(NBDistError, match="placeholder for a process group"):
        session.run(SUM)
    session.run("own = again = None")


MINE = """
both, alone = dist.new_group([0, 1]), [dist.new_group([0]), dist.new_group([1])][rank]
mine, by_axis = (alone, {"row": alone}) if rank else (both, {"row": both})
"""
RANKS = "[dist.get_process_group_ranks(group) for group in (mine, by_axis['row'])]"


def test_a_name_means_the_group_that_the_dead_rank_had_under_it(session: Session) -> None:
    session.run(MINE)
    with pytest.raises(RankError):
        session.run(DIE)  # rank 0, whose names come, has a group under this one that 1 is in, too
    assert session.run(RANKS).value_list == [[[0, 1]] * 2, [[1]] * 2]
    session.run("both = alone = mine = by_axis = None")


def test_a_name_that_the_cell_has_given_to_another_group_means_that_one(session: Session) -> None:
    session.run(MINE)
    with pytest.raises(RankError):
        session.run(f"mine = both\n{DIE}")
    assert session.run(RANKS).value_list == [[[0, 1]] * 2, [[0, 1], [1]]]
    session.run("both = alone = mine = by_axis = None")


def test_groups_that_a_scale_has_left_behind_are_not_formed_again(session: Session) -> None:
    session.run("own = dist.new_group([0, 1])")
    session.scale(3)
    with pytest.raises(NBDistError, match="no longer exists"):
        session.run("if rank < 2: dist.all_reduce(torch.ones(1), group=own)")
    session.run("own = dist.new_group([0, 2])")
    session.scale(2)
    total = "t = torch.ones(1); dist.all_reduce(t); t.item()"
    assert session.run(total).value_list == [2.0, 2.0]
    session.run("own = None")


SPREAD = """
torch.manual_seed(1)
pair = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
model = torch.nn.Sequential(pair, torch.nn.Linear(4, 2))
layout = nbdist.parallelize(model, {layout!r})
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward(); opt.step()
next(iter(model.parameters())).device_mesh.get_group("tp").group_name
"""


@pytest.mark.slow
def test_layouts_after_a_killed_rank_use_the_same_groups_on_every_rank(session: Session) -> None:
    session.scale(4)
    session.run(SPREAD.format(layout="dp=2 tp=2"), track=False)
    with pytest.raises(RankError, match="The part of Sequential that died was copied") as died:
        session.run(DIE)
    assert "which process group" not in str(died.value)  # which is no reason of a model's

    # To torch the second mesh of tp equals the first, on which the new process computed nothing.
    names = session.run(SPREAD.format(layout="fsdp=2 tp=2"), track=False).value_list
    assert (names[0], names[2]) == (names[1], names[3])
    session.run("del pair, model, layout, opt")
    session.scale(2)


@pytest.mark.slow
def test_a_mesh_of_which_the_dead_had_a_dim_alone_is_made_anew_by_all_ranks(
    session: Session,
) -> None:
    session.scale(4)
    code = SPREAD.format(layout="dp=2 fsdp=2").replace('"tp"', '"fsdp"')
    die = DIE.replace("rank == 1", "rank in (1, 3)")
    with pytest.raises(RankError):
        # Nobody lives who was in the group of ranks 1 and 3, and they did not end their cell.
        session.run(f"{code}\n{die}", track=False)

    names = session.run(code, track=False).value_list
    assert (names[0], names[2]) == (names[1], names[3])
    session.run("del pair, model, layout, opt")
    session.scale(2)
