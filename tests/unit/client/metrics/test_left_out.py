"""Steps that were left out, as counts that ranks have logged tell them."""

import pytest

from nbdist.client.metrics.left_out import left_out_steps
from nbdist.client.metrics.telemetry import Telemetry
from nbdist.shared.wire import MOST_LEFT_OUT, Batch, Record


def steps_of(*ranks: list[tuple[int, float]]) -> list[int]:
    telemetry = Telemetry()
    for rank, counts in enumerate(ranks):
        records = [
            Record(rank, i, "log", step, 0, {"left_out": count})
            for i, (step, count) in enumerate(counts)
        ]
        telemetry.receive(Batch(rank, tuple(records)))
    return left_out_steps(telemetry.series("left_out"))


def test_each_step_is_told_once_whatever_ranks_have_left_it_out() -> None:
    assert steps_of([(3, 1), (9, 2)], [(3, 1), (9, 2)]) == [3, 9]
    assert steps_of([(3, 1)], [(5, 1)], []) == [3, 5]
    assert steps_of() == []


def test_those_are_told_of_which_evidence_is_kept() -> None:
    counts = [(step, float(step)) for step in range(1, MOST_LEFT_OUT + 4)]
    assert steps_of(counts) == list(range(4, MOST_LEFT_OUT + 4))


def test_a_cell_that_runs_again_begins_to_count_anew() -> None:
    assert steps_of([(3, 1), (4, 2), (9, 1)]) == [3, 4, 9]


@pytest.mark.parametrize("value", [0.0, 0.25, 17.0])
def test_a_number_of_that_name_that_a_cell_logs_is_no_left_out_step(value: float) -> None:
    assert steps_of([(step, value) for step in range(1, 5)]) == []
