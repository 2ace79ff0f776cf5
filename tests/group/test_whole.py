"""Weights by name: from layout to layout bit by bit, and a plain model kept without its weights."""

from typing import Any

import pytest

from tests.group.harness import run_ranks

RANKS = "tests.group.whole_ranks:"


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, RANKS + "on_two_ranks")


EVERY = ["ddp", "fsdp=2 tp=2", "zero3", "dp=2 tp=2", "zero2", "tp=4", "dp=2 fsdp=2", "ddp"]


@pytest.mark.parametrize(
    "layouts",
    [["fsdp=2 tp=2", "zero3", "ddp"], pytest.param(EVERY, marks=pytest.mark.slow)],
    ids=["three", "every"],
)
def test_weights_go_from_layout_to_layout_bit_by_bit(layouts: list[str]) -> None:
    for found in run_ranks(4, RANKS + "copies", "tensor parallel", layouts):
        assert found == dict.fromkeys(layouts, True)


def test_a_pipeline_is_saved_by_rank_0_with_what_is_tied_elsewhere(
    two_ranks: list[dict[str, Any]],
) -> None:
    (saved, keys), (nothing, _) = (found["pipeline"] for found in two_ranks)
    assert saved == keys
    assert nothing == []


def test_a_model_that_a_function_made_is_saved_as_a_plain_one(
    two_ranks: list[dict[str, Any]],
) -> None:
    assert [found["factory"] for found in two_ranks] == [True, True]


def test_running_statistics_go_with_them(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert set(found["statistics"].values()) == {True}


@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3"])
def test_what_was_loaded_counts_in_the_next_forward(
    two_ranks: list[dict[str, Any]], layout: str
) -> None:
    assert [found["between steps"][layout] for found in two_ranks] == [[True, True]] * 2


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("missing", ["11 missing (blocks.1.norm_1.weight, ", ", and 8 more)", "nothing was"]),
        ("unexpected", ["1 unexpected (extra)"]),
        ("shape", ["1 of another shape (norm.weight is (3,) and must be (32,))"]),
        ("other model", ["missing (token.weight", "unexpected (stem.weight"]),
        ("other layout", ["missing (token.weight", "unexpected (stem.weight"]),
        ("parts", ["parts of tensors", "layout.load_from(other_layout)"]),
        ("a number", ["load_from got a int"]),
        ("state dict", ["accepted"]),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_words_on_every_rank(
    two_ranks: list[dict[str, Any]], case: str, words: list[str]
) -> None:
    for found in two_ranks:
        assert [word for word in words if word not in found["refused"][case]] == []


def test_nothing_is_changed_by_weights_that_are_refused(two_ranks: list[dict[str, Any]]) -> None:
    assert [found["refused"]["unchanged"] for found in two_ranks] == [True, True]


@pytest.mark.parametrize("layout", ["zero3", "tp=2", "pp=2"])
def test_a_whole_state_that_torch_cannot_load_is_refused_with_what_can(
    two_ranks: list[dict[str, Any]], layout: str
) -> None:
    for found in two_ranks:
        seen = found["by torch"][layout]
        for way in ("alone", "inside"):
            assert f'got whole weights, and in the layout "{layout}" this rank has' in seen[way]
            assert "layout.load_from(state)" in seen[way]
        assert seen["unchanged"]
        assert seen["its own"] == "<All keys matched successfully>"
        assert seen.get("by torch's checkpoints", True)


def test_a_skeleton_is_the_plain_model_without_weights(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        seen = found["skeletons"]
        assert seen.pop("buffers") == 0
        assert seen == dict.fromkeys(seen, True)


def test_a_model_that_cannot_be_copied_is_spread_and_says_why_it_has_no_skeleton(
    two_ranks: list[dict[str, Any]],
) -> None:
    for found in two_ranks:
        skeleton, why, name = found["uncopied"]
        assert skeleton is None
        assert "GPT cannot be copied: TypeError" in why
        assert name == "ddp"
