"""What no hook sees is refused before a step; what is advised computes it right."""

from typing import Any

import pytest

from tests.group.harness import run_ranks

RANKS = "tests.group.unseen_ranks:"
FLOOR = 1e-14  # float64, SGD


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, RANKS + "on_two_ranks", timeout_s=200)


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
@pytest.mark.parametrize(
    ("use", "words"),
    [
        ("a_penalty_alone", "Gradients of weight have not been averaged"),
        ("parts_left_early", "Gradients of weight, bias have not been averaged"),
        ("a_hook", "Hooks on weight are never called"),
    ],
)
def test_a_step_without_them_is_refused_and_changes_nothing(
    two_ranks: list[dict[str, Any]], use: str, words: str, layout: str
) -> None:
    for found in two_ranks:
        text, is_unchanged = found["refused"][use, layout]
        assert text.startswith(words)
        assert is_unchanged


@pytest.mark.parametrize("layout", ["ddp", "zero1"])
@pytest.mark.parametrize("use", ["a_method", "a_method_after_a_step"])
def test_a_backward_of_a_method_that_was_called_by_itself_is_refused_at_the_step(
    two_ranks: list[dict[str, Any]], use: str, layout: str
) -> None:
    for found in two_ranks:
        text, is_unchanged = found["uncalled"][use, layout]
        assert text.startswith(
            "Gradients of encoder.weight, encoder.bias are not averaged: no forward of Coder came "
        )
        assert "a method (forward, encode) or a part of it" in text
        assert is_unchanged


def test_a_second_backward_without_a_forward_is_refused_at_the_step_and_one_of_each_is_right(
    two_ranks: list[dict[str, Any]],
) -> None:
    for found in two_ranks:
        for text, is_unchanged in found["twice"]:
            assert text.startswith("Gradients of weight, bias are not averaged: a second backward ")
            assert is_unchanged
        assert found["twice called"] <= FLOOR


def test_a_method_that_forward_calls_as_is_advised_trains_as_in_one_process(
    two_ranks: list[dict[str, Any]],
) -> None:
    for found in two_ranks:
        assert max(found["called"]) <= FLOOR


def test_gradients_that_ranks_have_alike_need_no_forward(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert found["by hand"] == pytest.approx([0.9, 0.8, 0.6])


def test_a_penalty_as_is_advised_trains_as_in_one_process(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert max(found["advised"]) <= FLOOR


def test_a_hook_from_before_parallelize_is_refused(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert [text.split(",")[0] for text in found["hooked before"]] == [
            "Parameter bias has a hook"
        ] * 2


def test_a_hook_as_is_advised_is_called_as_in_one_process(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert max(found["hooked"]) <= FLOOR


def test_forwards_alone_change_no_training(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert max(found["between"] + found["after"]) <= FLOOR


def test_a_plain_training_is_not_looked_at_parameter_by_parameter(
    two_ranks: list[dict[str, Any]],
) -> None:
    assert [found["looks"] for found in two_ranks] == [0, 0]
