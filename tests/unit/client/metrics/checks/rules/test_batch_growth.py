"""A batch that grew without its learning rate is told once, and right programs never."""

from typing import Any

import pytest

from nbdist.client.metrics.checks.rule import Memory
from nbdist.client.metrics.checks.rules.batch_growth import (
    UNSCALED_LEARNING_RATE,
    Trained,
    Trainings,
    advice,
)
from nbdist.shared.wire import Record
from tests.unit.client.metrics.checks.watching import Watching

MODEL = (4, 100)


def trained(batch: int, lr: float = 0.1, parts: int = 1, **more: object) -> Trained:
    return Trained(MODEL, lr, batch, parts, **more)  # type: ignore[arg-type]


def test_a_fixed_batch_a_rank_on_more_ranks_is_told_with_its_numbers_and_both_ways_out() -> None:
    told = advice(trained(128, parts=4), [trained(32)])
    assert told.count("\n") == 0
    for words in (
        "from 32 to 128 samples per step (4 ranks x 32, before 1 rank x 32)",
        "still 0.1",
        "4 x fewer steps",
        "nbdist.scale_lr(optimizer, global_batch=128, reference_batch=32)",
        "nbdist.loader(dataset, global_batch=32)",
    ):
        assert words in told


def test_a_larger_batch_on_the_same_ranks_is_told() -> None:
    assert "(2 ranks x 32, before 2 ranks x 16)" in advice(
        trained(64, parts=2), [trained(32, parts=2)]
    )


def test_a_rate_scaled_for_less_than_a_step_takes_is_told_without_an_earlier_training() -> None:
    told = advice(trained(128, parts=2, scaled_for=64), [])
    assert "for batches of 64 samples, and a step takes 128 (2 ranks x 64)" in told
    assert "global_batch=128" in told


RIGHT_PROGRAMS = {
    "the first training": (trained(512, parts=8), []),
    "the batch fixed on more ranks": (trained(64, parts=4), [trained(64, parts=2)]),
    "a smaller batch": (trained(16), [trained(32)]),
    "the rate followed": (trained(64, lr=0.2, parts=2), [trained(32)]),
    "the rate followed by the square root": (trained(128, lr=0.2), [trained(32)]),
    "scaled for this batch": (trained(64, scaled_for=64), [trained(32)]),
    "scaled for this batch, where rates happen to be equal": (
        trained(64, lr=0.1, scaled_for=64),
        [trained(32, lr=0.1, scaled_for=32)],
    ),
    "another model": (Trained((4, 101), 0.1, 64, 2), [trained(32)]),
    "a remainder joined the batch": (trained(35), [trained(32)]),
    "as large as before": (trained(64), [trained(32), trained(64, lr=0.2), trained(32)]),
    "run again after it was told": (trained(64), [trained(32), trained(64)]),
    "run again after scale_lr was told too little": (
        trained(128, scaled_for=64),
        [trained(128, scaled_for=64)],
    ),
}


@pytest.mark.parametrize("program", RIGHT_PROGRAMS)
def test_a_right_program_is_left_alone(program: str) -> None:
    assert advice(*RIGHT_PROGRAMS[program]) == ""


# ---- What one cell's records tell ---------------------------------------------------------------


def record(rank: int, kind: str, step: int, **values: float) -> Record:
    return Record(rank, 0, kind, step, 0, values)


def run(
    before: list[Trained],
    samples: list[list[float]],
    *,
    is_of_sweep: bool = False,
    **optimizer: float,
) -> tuple[str, str]:
    """Return what is said while a cell runs and at its end; `samples` are by step and rank."""
    ranks = len(samples[0]) if samples else 1
    kernel = Memory()
    kernel.of(Trainings).extend(before)
    growth = Watching(UNSCALED_LEARNING_RATE, range(ranks), kernel=kernel, is_of_sweep=is_of_sweep)
    told = {"lr": 0.1, "tensors": 4.0, "numbers": 100.0, **optimizer}
    for rank in range(ranks):
        growth.take(record(rank, "optimizer", 0, **told))
    during = "".join(
        growth.take(record(rank, "step", step, **({"samples": n} if n else {})))
        for step, taken in enumerate(samples, 1)
        for rank, n in enumerate(taken)
    )
    after = growth.end()
    before[:] = kernel.of(Trainings)
    return during, after


def test_it_is_said_while_the_cell_runs_and_not_again_at_its_end() -> None:
    during, after = run([trained(32)], [[32, 32]] * 3, parts=2.0)
    assert "from 32 to 64" in during
    assert after == ""


def test_a_short_cell_is_judged_at_its_end() -> None:
    during, after = run([trained(32)], [[32, 32]], parts=2.0)
    assert during == ""
    assert "from 32 to 64" in after


def test_ranks_that_share_their_samples_count_once() -> None:
    before: list[Trained] = []
    run(before, [[32] * 4] * 3, parts=2.0)
    assert before == [trained(64, parts=2)]


def test_ranks_without_samples_do_not_count() -> None:
    before: list[Trained] = []
    run(before, [[32, 0]] * 3, parts=1.0)
    assert before == [trained(32)]


@pytest.mark.parametrize(
    ("samples", "optimizer"),
    [([], {}), ([[0]] * 3, {}), ([[32, 32]] * 3, {})],
    ids=["an evaluation", "no loader", "plain models on two ranks"],
)
def test_where_the_batch_is_not_known_nothing_is_said_or_remembered(
    samples: list[list[float]], optimizer: dict[str, Any]
) -> None:
    before = [trained(8)]
    assert run(before, samples, **optimizer) == ("", "")
    assert len(before) == 1


def test_the_values_of_a_sweep_are_varied_on_purpose() -> None:
    before = [trained(32)]
    assert run(before, [[64]] * 3, is_of_sweep=True) == ("", "")
    assert before[-1] == trained(64)


def test_a_plain_model_on_one_rank_is_the_reference_of_the_next_cell() -> None:
    before: list[Trained] = []
    assert run(before, [[32], [32], [7]]) == ("", "")
    assert "from 32 to 64" in run(before, [[32, 32]] * 3, parts=2.0)[0]
    assert run(before, [[32, 32]] * 3, parts=2.0) == ("", "")
