"""What `make test` runs of a matrix."""

import itertools

import pytest

from tests.pairwise import pairwise

CASES = list(itertools.product("abc", "xyzw", [True, False]))


def pairs_of(cases: list[tuple[object, ...]]) -> set[tuple[object, ...]]:
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def test_few_cases_meet_each_pair_of_values() -> None:
    chosen: list[tuple[object, ...]] = list(pairwise(CASES))
    assert pairs_of(chosen) == pairs_of(list(CASES))
    assert len(chosen) == 12  # as many as the two parameters with most values need


def test_a_pair_that_a_matrix_leaves_out_is_not_asked_for() -> None:
    without = [case for case in CASES if case[:2] != ("a", "x")]
    assert pairs_of(list(pairwise(without))) == pairs_of(list(without))


@pytest.mark.matrix
@pytest.mark.parametrize("third", [True, False])
@pytest.mark.parametrize("second", "xyzw")
@pytest.mark.parametrize("first", "abc")
def test_of_a_matrix_twelve_cases_are_run_and_the_rest_is_slow(
    request: pytest.FixtureRequest, first: str, second: str, third: bool
) -> None:
    items = [item for item in request.session.items if "twelve_cases" in item.name]
    assert len(items) in (1, 12, 24), "it alone, as in `make test`, or as in `make test-all`"
    assert sum(item.get_closest_marker("slow") is None for item in items) in (1, 12)
