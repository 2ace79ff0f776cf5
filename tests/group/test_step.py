"""`layout.step` with batches of every form: one process's gradients, and proofs."""

from typing import Any

import pytest

from tests.group.harness import run_ranks

RANKS = "tests.group.step_ranks:"
LAYOUTS = ("ddp", "zero3", "tp", "cp", "pp")
FORMS = ("dict", "a library's dict", "tuple", "list", "dict with a number")
FLOOR = 1e-13  # float64: the order of summation


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, RANKS + "on_two_ranks", timeout_s=300)


CASES = [("ddp", form) for form in FORMS]
CASES += [(layout, form) for layout in LAYOUTS[1:] for form in ("dict", "tuple")]


@pytest.mark.parametrize(("layout", "form"), CASES)
def test_several_inputs_and_targets_make_one_process_s_gradients(
    two_ranks: list[dict[str, Any]], layout: str, form: str
) -> None:
    assert max(found["steps"][layout, form] for found in two_ranks) <= FLOOR


def test_a_model_whose_argument_is_a_tuple_gets_it_within_one(
    two_ranks: list[dict[str, Any]],
) -> None:
    assert max(found["tuple"] for found in two_ranks) <= FLOOR


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_proven_with_several_inputs(
    two_ranks: list[dict[str, Any]], layout: str
) -> None:
    for found in two_ranks:
        by_hand, on_request, text = found["proofs"][layout]
        assert (by_hand, on_request) == (True, True), text
    told = "of the last layout.step" if layout in ("ddp", "zero3", "cp") else "policy's example"
    assert told in text


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no tensor", ["no tensor in x or y", "dict of tensors"]),
        ("no example", ["No batch is known", "layout.verify((x, y), loss_fn)"]),
    ],
)
def test_a_batch_that_tells_nothing_is_refused_in_words(
    two_ranks: list[dict[str, Any]], case: str, words: list[str]
) -> None:
    for found in two_ranks:
        assert [word for word in words if word not in found["refused"][case]] == []


@pytest.mark.slow
def test_a_model_of_transformers_is_stepped_by_what_its_tokenizer_gives() -> None:
    layouts = ["ddp", "zero2", "zero3", "tp=2", "pp=2"]
    for found in run_ranks(2, RANKS + "of_transformers", layouts, timeout_s=300):
        assert max(found.values()) <= FLOOR, found
