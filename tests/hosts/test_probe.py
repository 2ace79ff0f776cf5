"""`%dist probe` finds the latency and the bandwidth that each link was given."""

from itertools import combinations

import pytest

from nbdist.shared.text import aligned
from tests.hosts.bed import Bed
from tests.hosts.clusters import start
from tests.hosts.kernel import Kernel

pytestmark = pytest.mark.hosts

# Each host's own link: Mbit/s (None: what this machine can) and s in each direction.
LINKS: tuple[tuple[int | None, float], ...] = ((None, 0), (200, 0), (None, 0.01), (40, 0.02))
# What a link carries beside tensors: headers of Ethernet, IP and TCP in packets of 1,500 bytes.
_HEADERS = 1448 / 1514


def test_a_probe_finds_each_links_latency_and_bandwidth(bed: Bed) -> None:
    for host, (limit, delay_s) in zip(bed.hosts.values(), LINKS, strict=True):
        if limit:
            host.shape(f"{limit}mbit")
        if delay_s:
            host.delay(delay_s)
    with Kernel(bed["a"]) as kernel:
        start(kernel, "localhost:1,b:1,c:1,d:1", "--threads 1")
        kernel.run("found = nbdist.current().probe()")
        shown = kernel.run("for one in found: print(*one.ranks, one.latency_s, one.bandwidth)")
    rows = [("ranks", "given", "found", "given", "found")]
    for line, pair in zip(shown.splitlines(), combinations(range(4), 2), strict=True):
        first, second, latency_s, bandwidth = line.split()
        assert (int(first), int(second)) == pair
        delay_s = sum(LINKS[rank][1] for rank in pair)
        rates = [given for rank in pair if (given := LINKS[rank][0])]
        rate = min(rates) * 1e6 / 8 * _HEADERS if rates else None
        rows.append(
            (
                f"{first} - {second}",
                f"{delay_s * 1e3:.0f} ms",
                f"{float(latency_s) * 1e3:.2f} ms",
                f"{rate / 1e6:.1f} MB/s" if rate else "",
                f"{float(bandwidth) / 1e6:.1f} MB/s",
            )
        )
        # Packets come no earlier than they may; a busy machine makes them later.
        assert delay_s <= float(latency_s) < delay_s + 0.01, rows
        if rate:
            assert 0.7 * rate < float(bandwidth) < 1.3 * rate, rows
        else:
            assert float(bandwidth) > 200e6 / 8, rows
    print("\n".join(aligned(rows)))
