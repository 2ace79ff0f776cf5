"""Real ranks tell what they hold alike; a single bit that differs is named, and nothing else."""

import pytest

from nbdist.client.metrics.checks.rules.drift import REPLICAS_DIFFER
from nbdist.shared.wire import Record
from tests.group.harness import run_ranks
from tests.unit.client.metrics.checks.watching import Watching

RANKS = "tests.group.checks_ranks:"
Case = tuple[str, str, str | None]  # model, layout, and what rank 1 changes after step 2

RIGHT: list[Case] = [("conv", "ddp", None), ("gpt", "zero3", None), ("gpt", "ddp", None)]
WRONG: list[Case] = [
    ("conv", "ddp", "layer_1.0.conv_1.weight"),
    ("conv", "ddp", "layer_1.0.norm_1.running_mean"),
]


@pytest.fixture(scope="module")
def said() -> dict[Case, list[str]]:
    """What the notebook would say of each training on two ranks."""
    asked = RIGHT + WRONG
    return dict(zip(asked, _said(run_ranks(2, RANKS + "cases", asked)), strict=True))


def _said(on_ranks: list[list[list[tuple[int, dict[str, float]]]]]) -> list[list[str]]:
    found = []
    for trainings in zip(*on_ranks, strict=True):
        drift = Watching(REPLICAS_DIFFER, range(len(on_ranks)))
        lines = [
            drift.take(Record(rank, step, "alike", step, 0, values))
            for steps in zip(*trainings, strict=True)
            for rank, (step, values) in enumerate(steps)
        ]
        found.append([line for line in lines if line])
    return found


def test_a_thawed_weight_that_a_rank_changes_is_named_though_another_was_frozen() -> None:
    (lines,) = _said([[told] for told in run_ranks(2, RANKS + "frozen_since")])
    assert "Replicas differ at step 5 (equal until step 2): 1.weight" in lines[0]


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_training_gives_no_alarm(said: dict[Case, list[str]], case: Case) -> None:
    assert said[case] == []


def test_one_bit_of_one_weight_is_found_at_its_step_and_named(said: dict[Case, list[str]]) -> None:
    first = said[WRONG[0]][0]
    assert "Replicas differ at step 2 (equal until step 1)" in first
    assert "layer_1.0.conv_1.weight, rank 1 against rank 0." in first


def test_statistics_that_only_one_rank_changes_are_put_right_by_the_layout_or_named(
    said: dict[Case, list[str]],
) -> None:
    # The next training forward makes them rank 0's again; until then they differ.
    (line,) = said[WRONG[1]]
    assert "at step 2" in line
    assert "layer_1.0.norm_1.running_mean, rank 1 against rank 0." in line


@pytest.mark.slow
def test_replicas_of_shards_are_compared_with_their_like() -> None:
    asked: list[Case] = [
        ("gpt", "dp=2 fsdp=2", None),
        ("gpt", "dp=2 fsdp=2", "blocks.1.up.weight"),
    ]
    right, wrong = _said(run_ranks(4, RANKS + "cases", asked))
    assert right == []
    # Ranks 1 and 3 hold the same shard.
    assert "blocks.1.up.weight, rank 3 against rank 1." in wrong[0]


def test_fingerprints_tell_any_value_of_any_kind_of_tensor() -> None:
    (found,) = run_ranks(1, RANKS + "prints_of_tensors")
    assert found.pop("kinds") == 8
    assert all(found.values()), found


def test_sums_onto_gradients_that_a_step_has_used_are_not_told() -> None:
    for told in run_ranks(2, RANKS + "a_judge_that_another_models_loss_runs_through"):
        assert told == [0.0] * 3  # of steps 1, 2 and 5


def test_backwards_of_which_the_last_alone_averages_train_as_one_process_as_is_advised() -> None:
    for off in run_ranks(2, RANKS + "in_parts"):
        assert max(off.values()) <= 1e-15, off
