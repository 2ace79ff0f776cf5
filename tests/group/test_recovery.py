"""The process group after a death, and after many faults. What training keeps: test_fault_table."""

import pytest

from tests.group import faults, strategies
from tests.group.engines import cluster


def test_a_killed_rank_is_replaced_in_every_group_that_it_was_in() -> None:
    with cluster(3) as ranks:
        ranks.run(faults.make_group, "survivors", [0, 1])
        ranks.run(faults.make_group, "with the dead", [1, 2])
        for rank in (0, 1):
            ranks.engines[rank].post(faults.wait_in, "all_reduce")
        ranks.engines[2].kill()
        for rank in (0, 1):
            ranks.engines[rank].now(faults.abort)
        assert all(ranks.engines[rank].result()["released"] for rank in (0, 1))

        ranks.post_join(ranks.replace(2), 1)
        ranks.engines[2].post(faults.heal_replacement)
        for rank in (0, 1):
            ranks.engines[rank].post(faults.reform, 1)
        results = ranks.results()
        ranks.engines[2].result()

        assert [result["stale"] for result in results[:2]] == [[], []]
        assert [result["groups"] for result in results[:2]] == [2, 3]
        assert ranks.run(faults.sum_of_ranks) == [3.0, 3.0, 3.0]
        for rank in (0, 1):
            ranks.engines[rank].post(faults.sum_of_ranks, "survivors")
        assert [ranks.engines[rank].result() for rank in (0, 1)] == [1.0, 1.0]
        ranks.run(faults.make_group, "new", [0, 1, 2])
        assert ranks.run(faults.sum_of_ranks, "new") == [3.0, 3.0, 3.0]
        ranks.run(faults.reform, 2)
        assert ranks.run(faults.sum_of_ranks, "new") == [3.0, 3.0, 3.0]


@pytest.mark.slow  # of what a fault takes, test_group looks over fifty
@pytest.mark.parametrize("strategy", ["DDP", "fully_shard"])
def test_a_hundred_faults_in_a_row_leak_nothing(strategy: str) -> None:
    with cluster(2) as ranks:
        ranks.run(strategies.build, strategy)

        def fault(number: int) -> None:
            place = ("forward", "backward")[number % 2]
            ranks.post(strategies.train, number + 1, number, place)
            assert ranks.engines[1].result()["error"] == "Boom"
            ranks.engines[0].now(faults.abort)
            assert ranks.engines[0].result()["error"] == "released"
            ranks.run(strategies.recover, number + 1)
            ranks.run(strategies.train, number + 1)

        for number in range(10):  # what is made at first use
            fault(number)
        before = ranks.run(faults.usage)
        for number in range(10, 110):
            fault(number)
        after = ranks.run(faults.usage)

        for was, now in zip(before, after, strict=True):
            assert now["fds"] == was["fds"]
            assert now["threads"] <= was["threads"] + 2
            assert now["rss"] < was["rss"] + 100 * 100_000
        assert ranks.run(faults.status)[0]["reforms_left"] is None
