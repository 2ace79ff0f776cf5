"""What `%dist probe` measures and says."""

import pytest

from nbdist.client.session.probe import (
    DataWait,
    LinkProbe,
    PairLink,
    StepTraffic,
    choose_pairs,
    classes,
    links,
)
from nbdist.study.fit import Fit

SIZES = (8, 4096, *(65536 * 4**i for i in range(6)))
GLOO = 2e9  # bytes/s on one host
NIC = 1e9


def points(latency_s: float, bandwidth: float) -> tuple[tuple[int, float], ...]:
    return tuple((size, latency_s + size / bandwidth) for size in SIZES)


def pair(ranks: tuple[int, int], hosts: str, latency_s: float, bandwidth: float) -> PairLink:
    return PairLink(
        ranks, (hosts[0], hosts[-1]), latency_s, bandwidth, points(latency_s, bandwidth)
    )


def test_of_few_ranks_every_pair_is_measured() -> None:
    assert choose_pairs({0: "a", 1: "a", 2: "b"}) == [(0, 1), (0, 2), (1, 2)]


def test_of_many_ranks_each_link_is_measured_once() -> None:
    hosts = {rank: "ab"[rank // 8] for rank in range(16)}
    assert choose_pairs(hosts) == [(0, 1), (0, 8), (8, 9)]


def test_a_link_is_as_fast_as_its_slower_direction() -> None:
    hosts = {0: "a", 1: "a", 2: "b"}
    measured = {
        0: [points(1e-4, 1e9), points(1e-3, 1e8)],  # to 1, to 2
        1: [points(1e-4, 9e8), points(2e-3, 9e7)],  # to 0, to 2
        2: [points(1e-3, 1e7), points(2e-3, 8e7)],  # to 0, to 1
    }
    found = links([(0, 1), (0, 2), (1, 2)], hosts, measured)
    assert [one.ranks for one in found] == [(0, 1), (0, 2), (1, 2)]
    assert found[1].hosts == ("a", "b")
    assert found[1].latency_s == pytest.approx(1e-3)
    assert [one.bandwidth for one in found] == pytest.approx([9e8, 1e7, 8e7])
    assert [one.sender for one in found] == [None, 2, None]
    shown = str(LinkProbe(found))
    assert shown.splitlines()[2].endswith("0.12 x the median when rank 2 sends")
    assert "Links between hosts, slower (0 - 2: when rank 2 sends): " in shown


def test_links_inside_and_between_hosts_are_apart() -> None:
    found = classes(
        [
            pair((0, 1), "a", 2e-5, GLOO),
            pair((0, 2), "ab", 5e-5, NIC),
            pair((1, 2), "ab", 5e-5, 1.1 * NIC),
        ]
    )
    assert [one.name for one in found] == ["inside a host", "between hosts"]
    assert found[0].link.bandwidth == pytest.approx(GLOO)
    assert [pair.ranks for pair in found[1].pairs] == [(0, 2), (1, 2)]
    assert NIC < found[1].fit.bandwidth < 1.1 * NIC


def test_a_slower_pair_is_a_kind_of_its_own_and_named_with_the_rank_in_each() -> None:
    probe = LinkProbe(
        (
            pair((0, 1), "a", 2e-5, GLOO),
            pair((0, 2), "a", 2e-5, GLOO / 40),
            pair((1, 2), "a", 2e-5, GLOO / 41),
        )
    )
    assert [one.name for one in probe.classes] == ["inside a host", "inside a host, slower"]
    assert "Links inside a host, slower (0 - 2, 1 - 2: rank 2 in each): " in str(probe)
    assert str(probe).splitlines()[2].split() == [
        *("0", "-", "2", "a", "0.020", "ms", "50.0", "MB/s"),
    ]


def test_a_pair_that_answers_later_is_a_kind_of_its_own() -> None:
    found = classes([pair((0, 1), "ab", 5e-5, NIC), pair((0, 2), "ac", 1e-2, NIC)])
    assert [one.name for one in found] == ["between hosts", "between hosts, later"]
    assert found[1].pairs[0].ranks == (0, 2)


def test_a_slow_link_is_marked_in_the_table() -> None:
    shown = LinkProbe(
        (
            pair((0, 1), "a", 1e-4, 1e9),
            pair((0, 2), "ab", 1e-4, 1e9),
            pair((1, 2), "ab", 5e-3, 1e7),
        )
    )
    assert str(shown).splitlines()[:4] == [
        "ranks  hosts  latency   bandwidth",
        "0 - 1  a      0.100 ms  1.00 GB/s",
        "0 - 2  a - b  0.100 ms  1.00 GB/s",
        "1 - 2  a - b  5.00 ms   10.0 MB/s  0.01 x the median",
    ]


def test_the_verdict_says_what_links_computing_and_data_cost() -> None:
    rates = {rank: {"float32": 1e11, "bfloat16": 4e11} for rank in range(4)}
    rates[3] = {"float32": 9e10, "bfloat16": 2.4e11}
    probe = LinkProbe(
        tuple(pair((i, k), "a", 2e-5, GLOO) for i, k in choose_pairs(dict.fromkeys(range(4), "a"))),
        Fit(6e-4, 625e6, 0.08, 0.3, 65536),
        rates,
        DataWait(1, 0.012, 0.040),
        StepTraffic(30e6, {"all_reduce": 2}),
    )
    links_said, *others = probe.verdict()
    assert links_said.startswith("Links inside a host (6 pairs): 0.020 ms + 2.00 GB/s (half of ")
    assert others == [
        (
            "Ranks multiply matrices at 100 GFLOP/s in float32, 400 GFLOP/s in bfloat16 each, "
            "all at once. Rank 3 computes at 0.6 x the median."
        ),
        (
            "25 MB of gradients take about 40.6 ms to reduce on these 4 ranks: 0.600 ms + 625 MB/s "
            "(half of the messages are within 8 %, the worst 30 %, of 66 kB)."
        ),
        (
            "A step of the newest training sends 30 MB a rank in 2 collectives: predicted 33.2 ms, "
            "none of it hidden, all of it among all ranks."
        ),
        (
            "Of the newest training's steps rank 1 waits longest for data: 12.0 ms of 40.0 ms. "
            "Do: loader.probe()"
        ),
    ]


def test_a_ring_has_what_its_all_reduces_say() -> None:
    rates = {rank: {"float32": 1e11} for rank in range(4)}
    ring = LinkProbe((), Fit(6e-4, 500e6), rates).ring
    assert ring is not None
    assert ring.bandwidth == pytest.approx(750e6)  # each byte goes 1.5 times over a link
    assert ring.latency_s == pytest.approx(1e-4)  # six messages, one after another


def test_one_rank_has_no_links_and_still_computes() -> None:
    shown = str(LinkProbe((), None, {0: {"float32": 1e11}}, DataWait(0, 0.001, 0.1)))
    assert shown.splitlines() == [
        "Ranks multiply matrices at 100 GFLOP/s in float32 each, all at once.",
        (
            "Of the newest training's steps rank 0 waits longest for data: 1.00 ms of 100 ms, "
            "the loader keeps up."
        ),
    ]
