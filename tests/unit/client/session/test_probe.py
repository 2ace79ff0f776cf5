"""What `%dist probe` measures and says."""

from nbdist.client.session.probe import Link, LinkProbe, choose_pairs, links


def test_of_few_ranks_every_pair_is_measured() -> None:
    assert choose_pairs({0: "a", 1: "a", 2: "b"}) == [(0, 1), (0, 2), (1, 2)]


def test_of_many_ranks_each_link_is_measured_once() -> None:
    hosts = {rank: "ab"[rank // 8] for rank in range(16)}
    assert choose_pairs(hosts) == [(0, 1), (0, 8), (8, 9)]


def test_links_are_those_that_their_first_ranks_measured() -> None:
    hosts = {0: "a", 1: "a", 2: "b"}
    found = links(
        [(0, 1), (0, 2), (1, 2)], hosts, {0: [[1e-4, 1e9], [1e-3, 1e8]], 1: [[2e-3, 9e7]], 2: []}
    )
    assert found[1] == Link((0, 2), ("a", "b"), 1e-3, 1e8)
    assert found[2].bandwidth == 9e7


def test_a_slow_link_is_marked() -> None:
    shown = str(
        LinkProbe(
            (
                Link((0, 1), ("a", "a"), 1e-4, 1e9),
                Link((0, 2), ("a", "b"), 1e-4, 1e9),
                Link((1, 2), ("a", "b"), 5e-3, 1e7),
            )
        )
    )
    assert shown.splitlines() == [
        "ranks  hosts  latency   bandwidth",
        "0 - 1  a      0.100 ms  1.00 GB/s",
        "0 - 2  a - b  0.100 ms  1.00 GB/s",
        "1 - 2  a - b  5.00 ms   10.0 MB/s  0.01 x the median",
    ]
