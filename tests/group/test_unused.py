"""Gradients that never come, and parameters that come later: right, or refused before a step."""

from typing import Any

import pytest

from tests.group.harness import run_ranks

RANKS = "tests.group.unused_ranks:"
FLOOR = 1e-12  # float64, AdamW


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, RANKS + "on_two_ranks", timeout_s=300)


@pytest.mark.parametrize("use", ["plain loop", "no step", "layout.step", "accumulate", "zero1"])
def test_ddp_names_them_before_anything_is_changed(
    two_ranks: list[dict[str, Any]], use: str
) -> None:
    for found in two_ranks:
        text = found[use]["text"]
        assert "6 parameters got no gradient in this backward: blocks.1.spare.weight" in text
        assert "requires_grad_(False)" in text
        assert '"zero2"' in text
        assert found[use]["unchanged"]


def test_ddp_names_a_branch_that_is_not_taken_any_more(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert "2 parameters got no gradient" in found["branch"]
        assert "sometimes.weight, sometimes.bias" in found["branch"]


@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3"])
def test_what_a_rank_does_not_need_can_be_run_times_0_as_is_advised(
    two_ranks: list[dict[str, Any]], layout: str
) -> None:
    assert max(found["all run"][layout] for found in two_ranks) <= FLOOR


def test_what_no_loss_uses_can_be_frozen_as_is_advised(two_ranks: list[dict[str, Any]]) -> None:
    assert max(found["frozen"] for found in two_ranks) <= FLOOR


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3"])
def test_what_is_frozen_and_thawed_after_parallelize_trains_as_one_process_does(
    two_ranks: list[dict[str, Any]], layout: str
) -> None:
    assert max(found["in turns"][layout] for found in two_ranks) <= FLOOR


def test_thawing_is_refused_where_the_rest_of_a_compressed_step_would_be_lost(
    two_ranks: list[dict[str, Any]],
) -> None:
    for found in two_ranks:
        assert found["compressed"].startswith(
            "layer.0.weight, layer.0.bias, layer.1.weight, layer.1.bias cannot be frozen or thawed"
        )
        assert "Do:  parallelize without Compress" in found["compressed"]


def test_a_part_that_a_model_gets_after_parallelize_is_refused_by_name(
    two_ranks: list[dict[str, Any]],
) -> None:
    for found in two_ranks:
        for number, text in enumerate(found["grown"], 2):
            assert text.startswith(
                f"Gradients of layer.{number}.weight, layer.{number}.bias are not averaged."
            )
        for text in found["grown later"]:
            assert text.startswith("Gradients of layer.3.weight, layer.3.bias are not averaged.")


def test_ranks_that_train_different_parameters_are_refused_by_name_before_they_average(
    two_ranks: list[dict[str, Any]],
) -> None:
    for found in two_ranks:
        text, is_equal_after = found["unlike"]
        assert text.startswith(
            "Ranks train different parameters: layer.0.weight, layer.0.bias on rank 0, "
            "layer.1.weight, layer.1.bias on rank 1."
        )
        assert is_equal_after


@pytest.mark.parametrize("layout", ["zero2", "zero3", "tp=2", "pp=2"])
def test_other_layouts_train_as_one_process_does(
    two_ranks: list[dict[str, Any]], layout: str
) -> None:
    assert max(found["trains"][layout] for found in two_ranks) <= FLOOR


@pytest.mark.slow
def test_layouts_of_two_axes_train_as_one_process_does() -> None:
    layouts = ["hsdp", "dp=2 tp=2", "fsdp=2 tp=2", "pp=2 dp=2", "pp=2 fsdp=2", "fsdp=2 cp=2"]
    for found in run_ranks(4, RANKS + "trains", layouts, timeout_s=300):
        assert max(found.values()) <= FLOOR, found


@pytest.mark.parametrize("program", ["two networks", "penalty"])
def test_programs_that_reach_all_parameters_in_several_backwards_are_right(
    two_ranks: list[dict[str, Any]], program: str
) -> None:
    assert [found[program] for found in two_ranks] == [True, True]
