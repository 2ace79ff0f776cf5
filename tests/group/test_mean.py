"""`nbdist.mean` and `nbdist.same`, on two ranks."""

import math
from typing import Any

import pytest

from tests.group.harness import run_ranks


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(2, "tests.group.mean_ranks:on_two_ranks")


@pytest.mark.parametrize("form", ["batches", "tensor"])
def test_a_mean_counts_each_sample_once(found: list[dict[str, Any]], form: str) -> None:
    whole = (4 * 0.1 + 4 * 0.25 + 1.0 + 4 * 0.7) / 13
    assert [of[form] for of in found] == [pytest.approx(whole, abs=1e-15)] * 2


def test_a_rank_with_nothing_to_count_takes_part(found: list[dict[str, Any]]) -> None:
    assert [of["none here"] for of in found] == [2.0, 2.0]
    assert [of["nan of nothing"] for of in found] == [3.0, 3.0]
    assert all(math.isnan(of["nothing"]) for of in found)


def test_equal_values_are_one_in_whatever_order_they_lie(found: list[dict[str, Any]]) -> None:
    assert [of["equal"] for of in found] == [["same"] * 4] * 2


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("map", "labels['cat'] is 0 on rank 0; 1 on rank 1."),
        ("shorter", "split[3] is nothing on rank 0; 3 on rank 1."),
        ("field", "config.vocabulary is ['x'] on rank 0; ['x', 'y'] on rank 1."),
        ("set", "labels is {'a', 'b0'} on rank 0; {'a', 'b1'} on rank 1."),
        ("type", "labels is 1.0 on rank 0; 1 on rank 1."),
        ("tensor differs", "labels is tensor([1., 2.]) on rank 0; tensor([1., 3.]) on rank 1."),
    ],
)
def test_the_first_part_that_differs_is_named_on_all_ranks(
    found: list[dict[str, Any]], what: str, sentence: str
) -> None:
    for of in found:
        assert of[what].startswith("MismatchError: Ranks hold other values of ")
        assert sentence in of[what]


def test_what_cannot_be_compared_is_refused_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["unknown"].startswith("UsageError: nbdist.same cannot compare a object over")
