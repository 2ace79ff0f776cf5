"""Replicas that differ, found in what ranks tell of the same steps."""

from typing import Any

from nbdist.client.metrics.checks.rule import Memory
from nbdist.client.metrics.checks.rules.drift import MOST_OPEN, REPLICAS_DIFFER
from nbdist.shared.wire import CELL_END, Record
from tests.unit.client.metrics.checks.watching import Watching


class Drift(Watching):
    def __init__(self, ranks: list[int], session: Memory | None = None) -> None:
        super().__init__(REPLICAS_DIFFER, ranks, session=session)
        self.fingerprints: Any = self.watcher

    def tell(self, rank: int, step: int, prints: dict[str, float]) -> str:
        return self.take(Record(rank, step, "alike", step, 0, prints))


def test_ranks_that_tell_the_same_are_silent() -> None:
    drift = Drift([0, 1])
    told = {"a.weight": 1.0, "a.bias": 2.0}
    assert [drift.tell(rank, step, dict(told)) for step in (1, 2) for rank in (0, 1)] == [""] * 4


def test_a_rank_that_tells_another_number_is_named_with_the_tensors_and_the_step() -> None:
    drift = Drift([0, 1, 2])
    for rank in range(3):
        assert drift.tell(rank, 10, {"a.weight": 1.0, "b.weight": 5.0}) == ""
    assert drift.tell(0, 20, {"a.weight": 1.0, "b.weight": 6.0}) == ""
    assert drift.tell(2, 20, {"a.weight": 3.0, "b.weight": 7.0}) == ""
    said = drift.tell(1, 20, {"a.weight": 1.0, "b.weight": 6.0})
    assert (
        "at step 20 (equal until step 10): a.weight and 1 more, rank 2 against ranks 0-1." in said
    )


def test_parts_of_a_tensor_are_only_compared_with_the_same_part() -> None:
    drift = Drift([0, 1])
    assert drift.tell(0, 1, {"w@0.0": 1.0}) == ""
    assert drift.tell(1, 1, {"w@0.1": 2.0}) == ""
    drift.tell(0, 2, {"w@0.0": 1.0})
    assert "w, rank 1 against rank 0" in drift.tell(1, 2, {"w@0.0": 2.0})


def test_a_difference_from_the_first_step_on_is_said_to_be() -> None:
    drift = Drift([0, 1])
    drift.tell(0, 1, {"w": 1.0})
    assert "at step 1 (from the cell's first step on)" in drift.tell(1, 1, {"w": 2.0})


def test_steps_that_some_ranks_never_tell_are_forgotten() -> None:
    drift = Drift([0, 1])
    for step in range(10 * MOST_OPEN):
        drift.tell(0, step, {"w": 1.0})
    assert len(drift.fingerprints._open) <= MOST_OPEN


def test_models_are_compared_each_at_its_own_steps() -> None:
    drift = Drift([0, 1])
    assert drift.tell(0, 5, {"w": 1.0}) == drift.tell(0, 5, {"1:w": 2.0}) == ""
    assert drift.tell(1, 5, {"1:w": 2.0}) == drift.tell(1, 5, {"w": 1.0}) == ""
    drift.tell(0, 10, {"1:w": 1.0})
    assert "at step 10 (equal until step 5): w, rank 1" in drift.tell(1, 10, {"1:w": 2.0})


def test_what_differs_at_a_cells_end_is_said_once_until_it_changes() -> None:
    ends = Memory()

    def said(one: float, other: float) -> str:
        drift = Drift([0, 1], ends)
        drift.tell(0, CELL_END, {"m:w": one})
        return drift.tell(1, CELL_END, {"m:w": other})

    assert said(1.0, 1.0) == ""
    assert said(1.0, 2.0).startswith("Replicas differ at the cell's end: w, rank 1 against rank 0.")
    assert Drift([0], ends).tell(0, CELL_END, {"m:w": 1.0}) == ""  # a cell of one rank
    assert said(1.0, 2.0) == ""
    assert "rank 1 against rank 0" in said(1.0, 3.0)
    assert said(4.0, 4.0) == ""
    assert "rank 1 against rank 0" in said(1.0, 3.0)


def test_a_model_of_some_ranks_is_compared_among_them() -> None:
    drift = Drift([0, 1, 2])
    assert drift.tell(0, CELL_END, {"m|0,2:w": 1.0}) == ""
    assert "w, rank 2 against rank 0." in drift.tell(2, CELL_END, {"m|0,2:w": 2.0})


def weights(drift: Drift, rank: int, number: float, optimizer: float = 0.0) -> None:
    values = {"weights": number, "optimizer": optimizer}
    assert drift.take(Record(rank, 0, "use", 0, 0, values)) == ""


def test_of_gradients_that_a_loop_averages_itself_what_began_equal_is_to_stay_so() -> None:
    drift = Drift([0, 1])
    for rank in (0, 1):
        weights(drift, rank, 7.0)
        weights(drift, rank, 8.0 + rank, optimizer=1.0)
    for optimizer in (0, 1):
        drift.tell(0, 2, {f"hand {optimizer}:0.weight": 1.0, f"hand {optimizer}:1.weight": 2.0})
    said = drift.tell(1, 2, {"hand 0:0.weight": 1.0, "hand 0:1.weight": 3.0})
    assert "1.weight, rank 1 against rank 0. The loop all-reduces gradients by itself" in said
    assert drift.tell(1, 2, {"hand 1:0.weight": 1.0, "hand 1:1.weight": 3.0}) == ""


def test_a_rank_that_tells_of_its_first_weights_later_than_another_of_a_step_is_waited_for() -> (
    None
):
    drift = Drift([0, 1])
    weights(drift, 1, 7.0)
    assert drift.tell(1, 2, {"hand 0:w": 1.0}) == ""
    weights(drift, 0, 7.0)
    assert "w, rank 1 against rank 0" in drift.tell(0, 2, {"hand 0:w": 2.0})
