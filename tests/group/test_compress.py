"""Compressed gradients on real ranks, against their definitions in one process."""

from typing import Any

import pytest

from tests.group.harness import run_ranks


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(2, "tests.group.compress_ranks:on_two_ranks", timeout_s=100)


@pytest.mark.parametrize("case", ["bf16", "fp16", "bf16 alone"])
def test_rounded_gradients_are_those_of_the_definition_also_after_a_lost_step(
    seen: list[dict[str, Any]], case: str
) -> None:
    for rank in seen:
        assert rank[case]["apart"] == 0


def test_error_feedback_sends_later_what_rounding_left_out(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["bf16"]["from the truth"] < rank["bf16 alone"]["from the truth"]
        assert "sent as bf16, with error feedback, 50.0% of bytes" in rank["bf16"]["explained"]


@pytest.mark.parametrize("case", ["bf16", "powersgd", "reduce"])
def test_bytes_of_compressed_gradients_are_explained_within_1_percent(
    seen: list[dict[str, Any]], case: str
) -> None:
    for rank in seen:
        counted, explained = rank["bytes"][case]
        assert explained == pytest.approx(counted, rel=0.01)


def test_power_sgd_trains_and_keeps_ranks_alike(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        found = rank["powersgd"]
        assert found["powersgd alike"]
        assert found["powersgd"] != found["whole"]
        assert found["powersgd"] > 0.9 * found["whole"] > 1


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("fsdp", ['the layout is "zero3"', 'Precision("fp32", reduce="bf16")']),
        ("two answers", ["both say how gradients are sent"]),
        ("scale", ['does not go with Precision("fp16")']),
    ],
)
def test_compression_that_cannot_work_is_refused_with_the_nearest_that_does(
    seen: list[dict[str, Any]], case: str, words: list[str]
) -> None:
    for rank in seen:
        assert [word for word in words if word not in rank["refusals"][case]] == []
