"""Policies on real ranks: low precision and checkpoints, against one process that does the same."""

from typing import Any

import pytest

from tests.group.harness import run_ranks

RANKS = "tests.group.policy_ranks:"


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(2, RANKS + "on_two_ranks", timeout_s=100)


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_a_layout_in_bf16_trains_as_one_process_in_bf16(
    seen: list[dict[str, Any]], layout: str
) -> None:
    for rank in seen:
        # Two summands have one order: to the bit as one process under autocast, and as one with a
        # model of bf16 whose gradients are added up in float32.
        assert rank["bf16"][layout] == (0, 0)


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_bf16_is_near_full_precision_and_is_not_it(seen: list[dict[str, Any]], layout: str) -> None:
    for rank in seen:
        in_losses, in_state = rank["bf16"][f"{layout} in full"]
        assert 1e-4 < in_losses < 0.1
        # AdamW makes a full step, 1e-3, of a gradient that is rounding alone.
        assert 1e-4 < in_state < 5e-3


@pytest.mark.slow
def test_fp16_trains_as_one_process_with_a_scaler_of_its_own() -> None:
    for found in run_ranks(2, RANKS + "precisions", "fp16", timeout_s=100):
        assert found["ddp"] == (0, 0)
        assert found["zero3"] == (0, 0)


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_gradients_are_averaged_in_the_dtype_asked_for(
    seen: list[dict[str, Any]], layout: str
) -> None:
    for rank in seen:
        found = rank[f"reduced {layout}"]
        assert found["rounded"] <= found["exact"] / 3  # the order of rounding and of dividing
        assert 0 < found["exact"] < 1e-2
        assert "gradients are averaged in bf16" in found["explained"]


@pytest.mark.parametrize(
    "case",
    ["gpt zero3 all", "gpt ddp selective", "conv zero3 selective", "conv ddp every second"],
)
def test_a_checkpointed_model_trains_as_one_process_to_the_bit(
    seen: list[dict[str, Any]], case: str
) -> None:
    for rank in seen:
        assert rank["checkpoints"][case] == (0, 0)


def test_checkpoints_keep_the_inputs_of_blocks_and_nothing_in_them(
    seen: list[dict[str, Any]],
) -> None:
    for rank in seen:
        kept = rank["memory"]
        assert kept["explained, every"] == 3 * 4 * 12 * 32 * 4  # blocks, B, T, D, float32
        assert kept["inside, plain"] > 5 * kept["explained, every"]
        assert kept["outside, every"] == kept["outside, plain"] + kept["explained, every"]


def test_policies_keep_names_and_asking_for_the_same_again_is_harmless(
    seen: list[dict[str, Any]],
) -> None:
    for rank in seen:
        names = rank["names"]
        assert names["names"]
        assert names["keys"]
        assert names["again"]
        assert "cannot get other policies as well" in names["other"]
        assert "units are gathered and compute in bf16" in names["explained"]
        assert "4 blocks keep their inputs alone" in names["explained"]


@pytest.mark.slow
def test_one_infinite_gradient_on_one_rank_skips_the_step_on_all() -> None:
    for seen in run_ranks(4, RANKS + "overflow", "fsdp=2 tp=2"):
        assert seen["changes"][0] == 0
        assert seen["changes"][1] > 0
        assert seen["scales"] == [128, 128]


def test_gradients_are_clipped_without_their_scale(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        (norm, largest), *others = rank["clipped"]
        for its_norm, its_largest in others:
            assert its_norm == pytest.approx(norm, rel=1e-2)  # fp16's own error
            assert its_largest == pytest.approx(largest, rel=2e-2)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("half", ["parameter token.weight is float16 itself", "build the model in float32"]),
        ("no blocks", ["finds no blocks in this Linear"]),
        ("twice", ["Precision is given twice"]),
        ("no axis", ["TensorParallel is given", "no axis tp"]),
    ],
)
def test_a_policy_that_cannot_work_is_refused_in_words(
    seen: list[dict[str, Any]], case: str, words: list[str]
) -> None:
    for rank in seen:
        assert [word for word in words if word not in rank["refusals"][case]] == []
