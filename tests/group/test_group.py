"""The process group on real ranks: waiting ranks freed, groups re-created, who listens where."""

import time
from collections.abc import Iterator

import psutil
import pytest

from tests.group import faults
from tests.group.engines import Cluster, RankFailed, cluster

WAITS = (
    "all_reduce",
    "async all_reduce",
    "barrier",
    "recv",
    "broadcast",
    "all_gather_object",
    "monitored_barrier",
    "new_group",
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made


def reform(ranks: Cluster) -> list[dict[str, object]]:
    """Form the next generation on all ranks."""
    newest = max(status["generation"] for status in ranks.now(faults.status))
    return ranks.run(faults.reform, newest + 1)


def until_blocked(ranks: Cluster, which: tuple[int, ...]) -> None:
    deadline = time.monotonic() + 30
    while not all(ranks.engines[rank].now(faults.main_is_blocked) for rank in which):
        assert time.monotonic() < deadline, "the ranks never came to wait"


@pytest.mark.parametrize("what", WAITS)
def test_abort_frees_ranks_that_wait_for_one_that_never_comes(ranks: Cluster, what: str) -> None:
    for rank in (0, 1):
        ranks.engines[rank].post(faults.wait_in, what)
    until_blocked(ranks, (0, 1))

    ranks.now(faults.abort)
    answers = [ranks.engines[rank].result() for rank in (0, 1)]

    assert all(answer["released"] for answer in answers), "a wait's own timeout is no release"
    reform(ranks)
    assert ranks.run(faults.sum_of_ranks) == [3.0, 3.0, 3.0]


def test_a_rank_that_was_in_no_collective_fails_in_its_next_one_at_once(ranks: Cluster) -> None:
    ranks.now(faults.abort)
    ranks.now(faults.abort)  # again: harmless

    answers = ranks.run(faults.wait_in, "all_reduce")

    assert [answer["released"] for answer in answers] == [True, True, True]
    reform(ranks)
    assert ranks.run(faults.sum_of_ranks) == [3.0, 3.0, 3.0]


def test_an_order_to_let_go_that_arrives_a_generation_late_cuts_nothing(ranks: Cluster) -> None:
    old = ranks.now(faults.status)[0]["generation"]
    reform(ranks)

    assert ranks.now(faults.abort, old) == [0, 0, 0]
    assert ranks.run(faults.sum_of_ranks) == [3.0, 3.0, 3.0]


def test_a_generation_is_never_used_twice(ranks: Cluster) -> None:
    generation = ranks.now(faults.status)[0]["generation"]
    ranks.engines[0].post(faults.reform, generation)

    with pytest.raises(RankFailed, match=f"Generation {generation} .* has been used"):
        ranks.engines[0].result()


def test_a_reform_without_one_rank_names_it_and_the_next_one_succeeds(ranks: Cluster) -> None:
    reform(ranks)
    before = ranks.run(faults.usage)
    generation = ranks.now(faults.status)[0]["generation"] + 1
    for rank in (0, 1):
        ranks.engines[rank].post(faults.reform_in, generation, 0.5)
    for rank in (0, 1):
        with pytest.raises(RankFailed, match="rank 2 did not arrive"):
            ranks.engines[rank].result()

    reform(ranks)

    assert ranks.run(faults.sum_of_ranks) == [3.0, 3.0, 3.0]
    after = ranks.run(faults.usage)
    assert [rank["fds"] for rank in after] == [rank["fds"] for rank in before]


def test_abort_ends_a_reform_that_waits_for_a_rank(ranks: Cluster) -> None:
    generation = ranks.now(faults.status)[0]["generation"] + 1
    ranks.engines[0].post(faults.reform_in, generation, 50.0)
    until_blocked(ranks, (0,))
    ranks.engines[0].now(faults.abort, generation)

    with pytest.raises(RankFailed, match="ReleasedError"):
        ranks.engines[0].result()

    reform(ranks)
    assert ranks.run(faults.sum_of_ranks) == [3.0, 3.0, 3.0]


def test_groups_made_with_new_group_go_on_after_a_reform(ranks: Cluster) -> None:
    ranks.run(faults.make_group, "pair", [0, 2])
    ranks.now(faults.abort)

    results = reform(ranks)

    assert [result["groups"] for result in results] == [
        result["groups"] for result in (results[0], results[1], results[0])
    ]
    assert [result["stale"] for result in results] == [[], [], []]
    for rank in (0, 2):
        ranks.engines[rank].post(faults.sum_of_ranks, "pair")
    assert [ranks.engines[rank].result() for rank in (0, 2)] == [2.0, 2.0]


def test_a_group_half_made_when_the_fault_came_stops_nobody(ranks: Cluster) -> None:
    for rank in (0, 1):
        ranks.engines[rank].post(faults.wait_in, "new_group")
    until_blocked(ranks, (0, 1))
    ranks.now(faults.abort)
    assert all(ranks.engines[rank].result()["released"] for rank in (0, 1))
    reform(ranks)

    ranks.run(faults.make_group, "again", [0, 1, 2])

    assert ranks.run(faults.sum_of_ranks, "again") == [3.0, 3.0, 3.0]


def test_a_program_may_destroy_the_default_group_and_initialise_it_twice(ranks: Cluster) -> None:
    for _ in range(2):
        assert ranks.run(faults.initialise_again) == [3.0, 3.0, 3.0]
    ranks.now(faults.abort)
    reform(ranks)
    assert ranks.run(faults.sum_of_ranks) == [3.0, 3.0, 3.0]


def test_fifty_reforms_leave_descriptors_and_threads_as_they_were(ranks: Cluster) -> None:
    reform(ranks)
    before = ranks.run(faults.usage)
    for _ in range(50):
        reform(ranks)
    after = ranks.run(faults.usage)

    assert [use["fds"] for use in after] == [use["fds"] for use in before]
    assert [use["threads"] for use in after] == [use["threads"] for use in before]
    growth_kb = [(b["rss"] - a["rss"]) / 50 / 1e3 for a, b in zip(before, after, strict=True)]
    print(f"memory per re-form: {', '.join(f'{kb:.0f}' for kb in growth_kb)} kB")
    assert max(growth_kb) < 100
    assert ranks.now(faults.status)[0]["reforms_left"] is None


def test_store_and_ranks_listen_on_loopback_only(ranks: Cluster) -> None:
    pid = ranks.store.pid
    assert pid is not None
    hosts = [
        connection.laddr.ip
        for connection in psutil.Process(pid).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]

    assert hosts == ["127.0.0.1"]
    assert ranks.run(faults.listening_hosts) == [["127.0.0.1"]] * 3  # one gloo device a rank


def test_torch_still_has_every_private_part_that_we_use(ranks: Cluster) -> None:
    assert ranks.run(faults.what_broke) == [[], [], []]
