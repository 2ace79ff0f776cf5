"""Bytes that ranks send to each other: the tap's, against those that TCP has carried."""

import sys
from functools import cache

import pytest

from nbdist.shared.collectives import sent_bytes
from tests.group.harness import run_ranks
from tests.group.wire_bytes import CALLS, CASES, WAYS, Ways, all_cases, layouts

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
@pytest.mark.timeout(400)  # the first one waits for all
@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join((way.layout, *way.policies)))
def test_a_step_of_a_layout_sends_what_explain_says(way: Ways) -> None:
    ranks = [found[way] for found in _of_layouts()]
    wire = sum(sent for sent, _, _ in ranks) / len(ranks)
    told = sum(explained for _, explained, _ in ranks) / len(ranks)
    # gloo's headers and the barriers beside it are small against so much.
    assert told > 500_000
    assert wire == pytest.approx(told, rel=0.01), ranks[0][2]


@cache
def _of_layouts() -> list[dict[Ways, tuple[float, float, str]]]:
    return [
        dict(zip(WAYS, found, strict=True)) for found in run_ranks(4, layouts, WAYS, timeout_s=360)
    ]
