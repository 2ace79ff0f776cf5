"""A model from a function: the same weights, spread anew each time, and no rank but 0 holds all."""

from typing import Any

import pytest

from tests.group.factory_ranks import MINE
from tests.group.harness import run_ranks

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, "tests.group.factory_ranks:on_two_ranks", timeout_s=300)


@pytest.mark.parametrize("model", ["gpt", "conv", "parallel"])
def test_a_factory_gives_what_the_model_built_first_gives(
    two_ranks: list[dict[str, Any]], model: str
) -> None:
    for found in two_ranks:
        assert found[model] == dict.fromkeys(found[model], True)


def test_tied_weights_stay_tied_and_train(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert found["loss"][0] == found["loss"][1]


def test_ranks_hold_their_shards_and_rank_0_alone_the_whole(
    two_ranks: list[dict[str, Any]],
) -> None:
    (most_0, _), (most_1, end_1) = (found["held"] for found in two_ranks)
    assert most_0 > 1
    assert end_1 <= MINE
    assert most_1 <= MINE + 2 / 12  # its shards, and a block's worth on the way


def test_random_numbers_go_on_as_if_all_ranks_had_built_it(
    two_ranks: list[dict[str, Any]],
) -> None:
    assert [found["random"] for found in two_ranks] == [(True, True)] * 2


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("reads", ["no model on rank 1: RuntimeError", "code that reads weights"]),
        ("fails", ["no model on rank 0: ValueError: no such size"]),
        ("none", ["it returned a dict", "lambda: Model(config)"]),
    ],
)
def test_a_factory_that_makes_no_model_is_refused_in_words_on_every_rank(
    two_ranks: list[dict[str, Any]], case: str, words: list[str]
) -> None:
    for found in two_ranks:
        assert [word for word in words if word not in found["refused"][case]] == []
