"""What is known of the connections between real ranks, and links that are slow on purpose."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from nbdist.client.metrics.analysis.links import LinkSamples, SlowLink
from nbdist.client.metrics.analysis.work import LEAST_OF
from nbdist.shared.wire import Record
from tests.group import faults, link_ranks
from tests.group.engines import Cluster, cluster

N = 3
RATE = 40e6  # bytes/s
STEPS = 90
BYTES = 4 * link_ranks.COUNT
# A ring moves 2 (n - 1) / n of the bytes over each link.
SHAPED_MS = 1e3 * BYTES * 2 * (N - 1) / N / RATE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of connections")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    with cluster(N) as made:
        yield made


def slow_link(told: list[list[tuple[int, dict[str, float]]]]) -> SlowLink | None:
    links = LinkSamples()
    for rank, records in enumerate(told):
        for seq, (step, values) in enumerate(records):
            links.add(Record(rank, seq, "links", step, 0, values))
    return links.find()


def test_every_rank_finds_its_connections_and_the_caller_knows_whom_it_called(
    ranks: Cluster,
) -> None:
    found = ranks.run(link_ranks.connections)
    assert [len(pairs) for pairs in found] == [N - 1] * N
    ends = Counter(caller for caller, _ in chain(*found))
    assert set(ends.values()) == {2}  # both ends name a connection alike
    called = {
        (rank, peer) for rank, pairs in enumerate(found) for _, peer in pairs if peer is not None
    }
    assert {frozenset(ends) for ends in called} == {frozenset(p) for p in ((0, 1), (0, 2), (1, 2))}
    assert len(called) == 3


def test_both_ends_of_a_connection_count_the_same_bytes(ranks: Cluster) -> None:
    before = ranks.run(link_ranks.counts)
    ranks.run(link_ranks.all_reduce_ms, 20)
    after = ranks.run(link_ranks.counts)
    sent: Counter[str] = Counter()
    received: Counter[str] = Counter()
    for was, now in zip(before, after, strict=True):
        for name, (out, back) in now.items():
            sent[name] += out - was[name][0]
            received[name] += back - was[name][1]
    assert sent.total() == pytest.approx(received.total(), rel=1e-3)
    assert sent.total() == pytest.approx(20 * BYTES * 2 * (N - 1), rel=0.01)


def test_an_emulated_link_is_as_slow_as_asked_and_later_groups_are_too_until_it_is_lifted(
    ranks: Cluster,
) -> None:
    clean_ms = max(ranks.run(link_ranks.all_reduce_ms, 10))
    try:
        ranks.run(link_ranks.emulate, RATE, 1)
        ranks.run(link_ranks.make_group, "later", N)
        newest = max(status["generation"] for status in ranks.now(faults.status))
        in_default = max(ranks.run(link_ranks.all_reduce_ms, 10))
        in_later = max(ranks.run(link_ranks.all_reduce_ms, 10, "later"))
        ranks.run(faults.reform, newest + 1)
        formed_anew = max(ranks.run(link_ranks.all_reduce_ms, 10))
    finally:
        ranks.run(link_ranks.emulate, None, 1)
    print(
        f"{clean_ms:.1f} ms clean; {SHAPED_MS:.0f} asked: {in_default:.0f}, {in_later:.0f}, "
        f"{formed_anew:.0f}"
    )
    for shaped_ms in (in_default, in_later, formed_anew):
        assert 0.8 * SHAPED_MS < shaped_ms < 2 * SHAPED_MS + clean_ms
    lifted_ms = max(ranks.run(link_ranks.all_reduce_ms, 10))
    assert max(clean_ms, lifted_ms) < min(in_default, in_later, formed_anew) / 2


@pytest.mark.parametrize(
    "rank", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_the_rank_whose_sending_is_paced_is_named(ranks: Cluster, rank: int) -> None:
    ranks.run(link_ranks.emulate, RATE, rank)
    try:
        slow = slow_link(ranks.run(link_ranks.records_of, STEPS, 1))
    finally:
        ranks.run(link_ranks.emulate, None, rank)
    assert slow is not None
    assert slow.rank == slow.link[0] == rank
    assert slow.rate == pytest.approx(RATE, rel=0.3)
    assert slow.lost_s == pytest.approx(SHAPED_MS / 1e3, rel=0.4)


def test_links_that_nothing_was_done_to_are_silent_unless_an_end_lacks_a_core(
    ranks: Cluster,
) -> None:
    for _ in range(3):
        before = ranks.run(link_ranks.starved_s)
        slow = slow_link(ranks.run(link_ranks.records_of, 300, 1))
        after = ranks.run(link_ranks.starved_s)
        if slow is not None:  # as of any rank whose machine is full, nobody is told
            starved_s = max(after[rank] - before[rank] for rank in slow.link) / 300
            assert starved_s > LEAST_OF * slow.lost_s, slow


def slow_link_of_own_network(
    what: str, tools: tuple[str, ...], probe: str, program: str, *arguments: str
) -> SlowLink:
    """Return the link that is named where a program has made one slow in a network of its own."""
    if any(shutil.which(tool) is None for tool in (*tools, "unshare")):
        pytest.skip(f"NOT TESTED: {what}, for there is no {' or '.join((*tools, 'unshare'))}")
    own = ["unshare", "-rn"]
    allowed = subprocess.run([*own, "sh", "-c", probe], capture_output=True, text=True, timeout=20)
    if allowed.returncode:
        pytest.skip(f"NOT TESTED: {what} is not permitted here: {allowed.stderr}")
    ran = subprocess.run(
        [*own, sys.executable, "-m", program, *arguments],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    slow = slow_link(json.loads(ran.stdout))
    assert slow is not None
    return slow


def test_a_rank_whose_sending_the_kernels_own_queue_shapes_is_named() -> None:
    slow = slow_link_of_own_network(
        *("a link shaped by tc", ("tc", "ip")),
        "ip link set lo up && tc qdisc add dev lo root htb",
        *("tests.group.shaped", "3", "2", "320mbit"),
    )
    assert slow.rank == 2
    assert slow.rate == pytest.approx(40e6, rel=0.3)


def test_a_rank_whose_packets_arrive_late_is_named_with_its_round_trip() -> None:
    slow = slow_link_of_own_network(
        *("a delayed link", ("ip",)),
        "ip link set lo up && ip tuntap add dev probe mode tun && ip rule",
        *("tests.group.delayed", "3", "2", "0.01"),
    )
    assert slow.rank == 2
    assert slow.rtt_s > 0.005  # TCP's smoothed one comes near the delay from below


def test_received_bytes_are_what_the_collectives_between_two_calls_have_brought(
    ranks: Cluster,
) -> None:
    for received in ranks.run(link_ranks.received_by_all_reduces, 5):
        # A ring brings 2 (n - 1) / n of the bytes; gloo's own headers are below 0.03 %.
        assert received == pytest.approx(5 * BYTES * 2 * (N - 1) / N, rel=1e-3)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "fast", True])
def test_what_is_no_rate_is_refused(ranks: Cluster, value: object) -> None:
    said = ranks.run(link_ranks.refusal, value)
    assert said == [f"emulate_link takes bytes per second, at least 1, or None, not {value!r}."] * N


def test_a_sample_costs_less_than_the_exchange_of_a_megabyte(ranks: Cluster) -> None:
    exchange_ms = min(ranks.run(link_ranks.all_reduce_ms, 10))
    sample_ms = max(ranks.run(link_ranks.sample_ms, 200))
    print(f"a sample of {N - 1} connections: {sample_ms:.3f} ms; a megabyte: {exchange_ms:.2f} ms")
    assert sample_ms < exchange_ms
