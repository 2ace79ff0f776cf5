"""Whose cost is told: that of the ranks of the newest cell that trained."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

from nbdist.client.cells.cost_meter import CostMeter
from nbdist.client.cluster.cluster import Cluster
from nbdist.client.metrics.telemetry import Telemetry
from nbdist.shared.wire import Batch, Record

OF_RANK = {
    0: {"steps": 500, "step_us": 330.0, "measured_share": 0.1, "parts": {"tap": 3.0}},
    1: {"steps": 40, "step_us": 110_000.0, "measured_share": 1.0, "parts": {"tap": 90.0}},
}


def ask(rank: int, *_: Any, **__: Any) -> "Future[Any]":
    """Answer as a rank does: with its own newest cell that trained."""
    answer: Future[Any] = Future()
    answer.set_result(OF_RANK[rank])
    return answer


RANKS = cast(Cluster, SimpleNamespace(living=lambda: [0, 1], requests=SimpleNamespace(ask=ask)))


def trained_on(*ranks: int) -> Telemetry:
    telemetry = Telemetry()
    for rank in ranks:
        telemetry.receive(Batch(rank, (Record(rank, 0, "step", 1, 1, {"step_s": 1e-3}),)))
    return telemetry


def test_a_rank_that_was_not_in_the_newest_training_tells_nothing_of_an_earlier_one() -> None:
    meter = CostMeter()
    both, alone = trained_on(0, 1), trained_on(0)
    meter.begin(both, set)
    meter.end(both)
    assert meter.cost(RANKS).step_us == (330.0 + 110_000.0) / 2

    meter.begin(alone, set)
    meter.end(alone)
    assert meter.cost(RANKS).step_us == 330.0


def test_that_is_so_too_where_the_newest_was_too_short_to_be_counted_in_the_notebook() -> None:
    meter = CostMeter()
    both = trained_on(0, 1)
    meter.begin(both, set)
    meter.end(both)
    meter.end(trained_on(0))
    told = meter.cost(RANKS)
    assert told.step_us == 330.0
    assert "too short to tell what the notebook did" in str(told)
