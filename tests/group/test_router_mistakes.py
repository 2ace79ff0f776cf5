"""Mistakes in the routers of experts are named: by the proof, or by the layout's explanation.

Those with adapters are in test_adapters.
"""

from functools import cache

import pytest

from tests.group.harness import run_ranks

NO_GRADIENT = "blocks.0.router.weight and 3 more was not compared: it gets no gradient."
# By mistake, what names it.
NAMED = {
    "weights left out": NO_GRADIENT,
    "no_grad": NO_GRADIENT,
    "noise of its own": "does not compute the same twice in one process",
    "capacity by rank": "in one piece the batch has another loss",
    "balance by rank": "in one piece the batch has another loss",
    "another router on a rank": "DIFFERS: the weight of blocks.0.router.weight",
    "experts' gradients not divided": "DIFFERS: the gradient of blocks.0.experts",
}


@cache
def _told() -> list[dict[str, str]]:
    return run_ranks(2, "tests.group.router_ranks:mistakes")


@pytest.mark.parametrize("mistake", NAMED)
def test_a_mistake_in_a_router_is_named_on_every_rank(mistake: str) -> None:
    for of_rank in _told():
        assert NAMED[mistake] in of_rank[mistake]


def test_a_router_without_a_mistake_is_said_to_be_right() -> None:
    for of_rank in _told():
        said = of_rank["none"]
        assert "ep=2 against one process on the same split: equal" in said
        assert not any(words in said for words in NAMED.values())


def test_experts_that_no_token_chooses_are_told_by_the_rank_that_has_them() -> None:
    first, second = (of_rank["an expert without tokens"] for of_rank in _told())
    assert "blocks.0.experts: tokens by expert in the last forward, on this rank: [0, 0]" in second
    assert "on this rank: [0, 0]" not in first
