"""Where ranks are."""

import pytest

from nbdist.shared.errors import StartError
from nbdist.shared.placement import (
    RankPlacement,
    assign,
    gpu_of,
    keep_numbers,
    one_host,
    peer_of,
    places,
)

SLOTS = {"a": 2, "b": 2, "c": 1}


def test_ranks_of_one_host_follow_each_other() -> None:
    assert assign(range(4), SLOTS, {}) == {0: "a", 1: "a", 2: "b", 3: "b"}


def test_who_lives_stays_and_who_lost_its_host_goes_to_a_free_slot() -> None:
    before = assign(range(4), SLOTS, {})
    without_b = {host: count for host, count in SLOTS.items() if host != "b"}
    assert assign(range(3), without_b, before) == {0: "a", 1: "a", 2: "c"}


def test_a_rank_without_a_slot_is_named() -> None:
    with pytest.raises(LookupError) as missing:
        assign(range(4), {"a": 2, "c": 1}, {})
    assert missing.value.args == (3,)


def test_numbers_on_a_host_are_as_torchrun_gives_them() -> None:
    found = places({0: "a", 1: "a", 2: "b"}, {"a": "10.0.0.1", "b": "10.0.0.2"})
    assert found[1] == RankPlacement("a", "10.0.0.1", 1, 2, 0, 2, peer=2, leads=False)
    assert found[2] == RankPlacement("b", "10.0.0.2", 0, 1, 1, 2, peer=0)


def test_one_host_is_one_node() -> None:
    assert one_host(2, "127.0.0.1")[1] == RankPlacement(
        "localhost", "127.0.0.1", 1, 2, 0, 1, peer=0, leads=False
    )


def test_who_stays_on_a_host_keeps_its_number_and_with_it_its_gpu() -> None:
    addresses = {"a": "10.0.0.1", "b": "10.0.0.2"}
    before = places({0: "a", 1: "a", 2: "b", 3: "b"}, addresses)
    all_on_b = keep_numbers(places(dict.fromkeys(range(4), "b"), addresses), before)
    assert [all_on_b[rank].local_rank for rank in range(4)] == [2, 3, 0, 1]
    assert [all_on_b[rank].leads for rank in range(4)] == [True, False, False, False]
    fewer = keep_numbers(places(dict.fromkeys(range(3), "b"), addresses), all_on_b)
    again = keep_numbers(places(dict.fromkeys(range(4), "b"), addresses), fewer)
    assert (fewer[0].local_rank, again[3].local_rank) == (2, 1)


@pytest.mark.parametrize(
    ("hosts", "peers"),
    [
        ("aaaa", [1, 2, 3, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("abc", [1, 2, 0]),
        ("aab", [2, 2, 0]),
        ("abab", [1, 2, 1, 2]),  # after a host was lost
        ("a", [None]),
    ],
)
def test_a_peer_is_on_another_host_where_there_are_several(
    hosts: str, peers: list[int | None]
) -> None:
    where = dict(enumerate(hosts))
    assert [peer_of(rank, where) for rank in where] == peers


def test_each_rank_of_a_host_has_the_gpu_of_its_number() -> None:
    assert [gpu_of(rank, 4, "cpu:gloo,cuda:nccl", {}) for rank in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("backend", "environ"), [("gloo", {}), ("nccl", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})]
)
def test_ranks_that_may_share_gpus_are_dealt_out_over_them(
    backend: str, environ: dict[str, str]
) -> None:
    assert [gpu_of(rank, 2, backend, environ) for rank in range(4)] == [0, 1, 0, 1]


def test_a_rank_without_a_gpu_of_its_own_is_refused_where_nccl_would_fail_later() -> None:
    with pytest.raises(StartError) as refused:
        gpu_of(1, 1, "cpu:gloo,cuda:nccl", {"NCCL_MULTI_RANK_GPU_ENABLE": "0"})
    assert refused.value.what == "Rank 1 of this host would share a GPU, for it has 1 GPU."
    assert "NCCL refuses two ranks on one GPU" in refused.value.why
    with pytest.raises(StartError, match="This host has no GPU that torch can use"):
        gpu_of(0, 0, "gloo", {})
