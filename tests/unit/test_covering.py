"""What `make test` runs of a matrix."""

import itertools

import pytest

from tests.covering import covering

CASES = list(itertools.product("abc", "xyzw", [True, False]))


def values_of(cases: list[tuple[object, ...]]) -> set[tuple[int, object]]:
    return {value for case in cases for value in enumerate(case)}


def pairs_of(cases: list[tuple[object, ...]]) -> set[tuple[object, ...]]:
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def test_few_cases_meet_each_value() -> None:
    chosen: list[tuple[object, ...]] = list(covering(CASES))
    assert values_of(chosen) == values_of(list(CASES))
    assert len(chosen) == 6


def test_of_two_parameters_no_more_cases_are_chosen_than_one_has_values() -> None:
    chosen = covering(list(itertools.product("abc", "xyzw")))
    assert chosen == [("a", "x"), ("b", "y"), ("c", "z"), ("a", "w")]


def test_with_gains_down_to_one_cases_meet_each_pair_of_values() -> None:
    chosen: list[tuple[object, ...]] = list(covering(CASES, (3, 2, 1)))
    assert pairs_of(chosen) == pairs_of(list(CASES))
    assert len(chosen) == 12  # as many as the two parameters with most values need


def test_a_value_that_a_matrix_leaves_out_is_not_asked_for() -> None:
    without = [case for case in CASES if case[0] != "a"]
    assert values_of(list(covering(without))) == values_of(list(without))


@pytest.mark.matrix
@pytest.mark.parametrize("third", [True, False])
@pytest.mark.parametrize("second", "xyzw")
@pytest.mark.parametrize("first", "abc")
def test_of_a_matrix_six_cases_are_run_and_the_rest_is_slow(
    request: pytest.FixtureRequest, first: str, second: str, third: bool
) -> None:
    items = [item for item in request.session.items if "six_cases" in item.name]
    assert len(items) in (1, 6, 24), "it alone, as in `make test`, or as in `make test-all`"
    assert sum(item.get_closest_marker("slow") is None for item in items) in (1, 6)
