"""A killed rank's successor is in the groups that its predecessor was in, and on their meshes."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from tests.group import clone_ranks
from tests.group.engines import Cluster, cluster

STEPS, KILL_AT = 5, 2
PAIRS = """
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
mine = groups[dist.get_rank() // 2]
far = dist.new_group([0, 3], group_desc="far apart", timeout=__import__("datetime").timedelta(0, 9))
"""
_generations = count(1)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    with cluster(4) as made:
        made.run(clone_ranks.cell, clone_ranks.DEFINE + PAIRS)
        yield made


def replace(ranks: Cluster, *dead: int) -> list[dict[str, Any]]:
    """Put new processes in the places of dead ranks, and return what each rank says of it."""
    generation = next(_generations)
    for rank in dead:
        ranks.post_join(ranks.replace(rank), generation)
    ranks.post(clone_ranks.recover, generation, None, list(dead), KILL_AT)
    for rank in dead:
        ranks.engines[rank].result()  # of its join
    return ranks.results()


def run_until_killed(ranks: Cluster, cell: str, dead: int) -> None:
    """Run a cell in which a rank is killed, and let the others go."""
    ranks.post(clone_ranks.try_cell, cell)
    ranks.engines[dead].process.join(30)
    living = [engine for engine in ranks.engines if engine.rank != dead]
    for engine in living:
        engine.now(clone_ranks.let_go)
    for engine in living:
        engine.result()


def sums(ranks: Cluster, group: str, members: tuple[int, ...] = (0, 1, 2, 3)) -> list[float]:
    """Return, of each member, 2 ** rank summed over the ranks of its group."""
    for rank in members:
        ranks.engines[rank].post(clone_ranks.sum_over, group)
    return [ranks.engines[rank].result() for rank in members]


@pytest.mark.parametrize("dead", [3, 0])
def test_training_on_a_group_of_two_is_bit_equal_to_an_unbroken_run(
    ranks: Cluster, dead: int
) -> None:
    prepare = "prepare(lambda net: DDP(net, process_group=mine, bucket_cap_mb=0.004), 'adam')"
    ranks.run(clone_ranks.cell, f"{prepare}\ntrain({STEPS})")
    unbroken = ranks.run(clone_ranks.fingerprint), ranks.run(clone_ranks.tensors_of_optimizer)
    assert unbroken[0][0] == unbroken[0][1] != unbroken[0][2] == unbroken[0][3]

    ranks.run(clone_ranks.cell, prepare)
    ranks.engines[dead].post(clone_ranks.cell, f"armed = ({KILL_AT}, 'backward')")
    ranks.engines[dead].result()
    # The other pair waits at the same step: how far it would come is a matter of luck.
    pair = f"dist.get_rank() // 2 == {dead // 2}"
    run_until_killed(ranks, f"train({KILL_AT})\ndist.barrier()\nif {pair}: train({STEPS})", dead)
    for rank in {0, 1, 2, 3} - {dead, dead ^ 1}:
        ranks.engines[rank].post(clone_ranks.value, "step")
        assert ranks.engines[rank].result() == KILL_AT
    answers = replace(ranks, dead)

    assert answers[dead]["cloned"]["source"] == dead ^ 1
    assert answers[dead]["cloned"]["placeholders"] == {}
    ranks.run(clone_ranks.cell, f"train({STEPS})")
    after = ranks.run(clone_ranks.fingerprint), ranks.run(clone_ranks.tensors_of_optimizer)
    assert after == unbroken


def test_groups_are_the_replacements_own_with_what_they_were_made_with(ranks: Cluster) -> None:
    count = ranks.run(clone_ranks.group_count)
    ranks.engines[3].kill()
    replace(ranks, 3)

    assert sums(ranks, "mine") == [3.0, 3.0, 12.0, 12.0]
    assert sums(ranks, "groups[dist.get_rank() // 2]") == [3.0, 3.0, 12.0, 12.0]
    assert ranks.run(clone_ranks.group_count) == count
    ranks.run(clone_ranks.cell, "later = dist.new_group([1, 3])")
    assert sums(ranks, "later", (1, 3)) == [10.0, 10.0]
    specs = ranks.run(clone_ranks.spec_of, "far apart")
    assert specs[3] == specs[0]
    assert specs[0][-2:] == (9.0, "far apart")
    # And once more: the replacement is one of the living now.
    ranks.engines[2].kill()
    replace(ranks, 2)
    assert sums(ranks, "mine") == [3.0, 3.0, 12.0, 12.0]
    assert sums(ranks, "later", (1, 3)) == [10.0, 10.0]


def test_a_mesh_of_two_dims_works_along_both_and_nbdists_layouts_share_theirs(
    ranks: Cluster,
) -> None:
    ranks.run(
        clone_ranks.cell,
        """
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
part = mesh["tp"]
net = nn.Linear(4, 4)
laid_out = nbdist.parallelize(net, "ddp")
""",
    )
    ranks.engines[3].kill()
    answers = replace(ranks, 3)

    assert not {"mesh", "part", "net", "laid_out"} & set(answers[3]["cloned"]["placeholders"])
    assert sums(ranks, "mesh.get_group('dp')") == [5.0, 10.0, 5.0, 10.0]
    assert sums(ranks, "mesh['tp'].get_group()") == [3.0, 3.0, 12.0, 12.0]
    assert sums(ranks, "part.get_group()") == [3.0, 3.0, 12.0, 12.0]
    assert ranks.run(clone_ranks.value, "tuple(mesh.get_coordinate())") == [
        *((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    assert sums(ranks, "laid_out.mesh.get_group()") == [15.0] * 4
    # Tensors cut along it can be made anew.
    ranks.run(
        clone_ranks.cell,
        """
from torch.distributed.tensor import Shard, distribute_tensor
whole = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0), Shard(1)]).full_tensor()
""",
    )
    assert ranks.run(clone_ranks.value, "whole.sum().item()") == [28.0] * 4


def test_groups_that_are_called_alike_on_all_ranks_are_the_replacements_own(ranks: Cluster) -> None:
    ranks.run(
        clone_ranks.cell,
        """
rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
row, column, minus = rows[dist.get_rank() // 2], columns[dist.get_rank() % 2], -100
""",
    )
    for dead in (3, 0):
        ranks.engines[dead].kill()
        cloned = replace(ranks, dead)[dead]["cloned"]

        names = {"row", "rows", "column", "columns", "far"}
        assert not names & {*cloned["placeholders"], *cloned["differ"]}
        assert ranks.run(clone_ranks.value, "columns[1 - dist.get_rank() % 2]") == [-100] * 4
        assert sums(ranks, "row") == [3.0, 3.0, 12.0, 12.0]
        assert sums(ranks, "column") == [5.0, 10.0, 5.0, 10.0]
        assert sums(ranks, "rows[dist.get_rank() // 2]") == [3.0, 3.0, 12.0, 12.0]
        assert sums(ranks, "columns[dist.get_rank() % 2]") == [5.0, 10.0, 5.0, 10.0]
        assert sums(ranks, "far", (0, 3)) == [9.0, 9.0]
        assert ranks.run(clone_ranks.value, "minus") == [-100] * 4


def test_two_replacements_of_different_groups_have_sources_of_their_own(ranks: Cluster) -> None:
    ranks.run(clone_ranks.cell, "pair = dist.get_rank() // 2")
    for rank in (1, 2):
        ranks.engines[rank].kill()

    answers = replace(ranks, 1, 2)

    assert [answers[rank]["cloned"]["source"] for rank in (1, 2)] == [0, 3]
    assert ranks.run(clone_ranks.value, "pair") == [0, 0, 1, 1]
    assert sums(ranks, "mine") == [3.0, 3.0, 12.0, 12.0]


def test_a_group_whose_members_have_all_died_is_formed_again_under_its_names(
    ranks: Cluster,
) -> None:
    ranks.run(
        clone_ranks.cell,
        "import types\npair = dist.new_group([0, 1])\nheld = types.SimpleNamespace(deep=pair)",
    )
    for rank in (0, 1):
        ranks.engines[rank].kill()

    answers = replace(ranks, 0, 1)

    assert answers[0]["cloned"]["source"] in (2, 3)
    assert sums(ranks, "pair", (0, 1)) == [3.0, 3.0]
    assert ranks.run(clone_ranks.value, "pair == -100") == [False, False, True, True]
    # Inside of an object nobody knows whose group it was: no collective may do nothing there.
    assert "held" in answers[0]["cloned"]["placeholders"]
    ranks.run(
        clone_ranks.cell,
        """
try:
    told = dist.all_reduce(torch.ones(1), group=held.deep) if dist.get_rank() < 2 else None
except Exception as error:
    told = str(error)
""",
    )
    for text in ranks.run(clone_ranks.value, "told")[:2]:
        assert "This is a placeholder for a process group that rank" in text
    ranks.run(clone_ranks.cell, "del held")


def test_a_model_of_the_dead_rank_that_its_source_does_not_hold_is_named(ranks: Cluster) -> None:
    ranks.run(
        clone_ranks.cell,
        """
sides = [dist.new_group([0, 1]), dist.new_group([1, 2])]
left = DDP(nn.Linear(2, 2), process_group=sides[0]) if dist.get_rank() < 2 else None
right = DDP(nn.Linear(2, 2), process_group=sides[1]) if dist.get_rank() in (1, 2) else None
""",
    )
    ranks.engines[1].kill()
    told = replace(ranks, 1)[1]["cloned"]

    assert told["source"] == 0
    assert "Rank 1 has no right: rank 0, from which rank 1 was cloned, does not hold it." in (
        " ".join(told["inexact"])
    )
    answer = ranks.run(clone_ranks.value, "repr(right)[:24]")
    assert answer[1] == "<placeholder for Linear:"
    ranks.run(clone_ranks.cell, "left = right = sides = None")


def test_what_one_replacement_cannot_build_another_of_the_same_source_gets(ranks: Cluster) -> None:
    ranks.run(
        clone_ranks.cell,
        """
side = dist.new_group([0, 2])
net = DDP(nn.Linear(2, 2), process_group=side) if dist.get_rank() in (0, 2) else None
""",
    )
    for rank in (1, 2):
        ranks.engines[rank].kill()

    answers = replace(ranks, 1, 2)

    assert "net" in answers[1]["cloned"]["placeholders"]
    assert "net" not in answers[2]["cloned"]["placeholders"]
    assert ranks.run(clone_ranks.value, "type(net).__name__")[2] == "DistributedDataParallel"
    ranks.run(clone_ranks.cell, "net = side = None")
