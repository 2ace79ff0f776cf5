"""Bytes that ranks send to each other: the tap's, against those that TCP has carried."""

import sys
from functools import cache

import pytest

from nbdist.client.insight.traffic import sent_bytes
from tests.group.harness import run_ranks
from tests.group.wire_bytes import CALLS, CASES, all_cases, layouts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts TCP's bytes")


@cache
def _measured(n: int) -> list[dict[str, tuple[int, int]]]:
    return run_ranks(n, all_cases, timeout_s=120)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("n", [2, 3])
def test_bytes_of_a_collective_are_those_on_the_wire(n: int, kind: str) -> None:
    ranks = [of_rank[kind] for of_rank in _measured(n)]
    wire = sum(received for received, _ in ranks) / CALLS / n
    counted = ranks[0][1] // CALLS
    assert counted > 5_000_000
    # gloo's own headers are below 0.03 %.
    senders = 1 / n if kind == "send" else 1  # one rank of them all sends
    assert wire == pytest.approx(sent_bytes(kind, counted, n, "gloo") * senders, rel=1e-3)


@pytest.mark.slow
def test_a_step_of_a_layout_sends_what_explain_says() -> None:
    ranks = run_ranks(3, layouts, ["ddp", "zero1", "zero2", "zero3"], timeout_s=120)
    for name, (_, told) in ranks[0].items():
        wire = sum(of_rank[name][0] for of_rank in ranks) / len(ranks)
        # Headers and the barriers beside it are small against 6 MB.
        assert wire == pytest.approx(told, rel=0.01), name
