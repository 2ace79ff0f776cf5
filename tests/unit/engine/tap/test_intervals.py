"""Unions of intervals."""

from hypothesis import given
from hypothesis import strategies as st

from nbdist.engine.tap.intervals import merged, union, without


def test_overlap_counts_once_and_gaps_do_not_count() -> None:
    assert union([(5, 9), (0, 4), (3, 6), (20, 21)]) == 10


def test_what_lies_outside_the_window_is_cut_off() -> None:
    assert union([(0, 10), (12, 30)], since=5, until=15) == 8
    assert union([(0, 3)], since=5) == 0


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40))))
def test_union_is_the_number_of_units_that_an_interval_covers(pairs: list[tuple[int, int]]) -> None:
    covered = {unit for start, end in pairs for unit in range(start, end)}
    assert union(pairs) == len(covered)


def test_merged_gives_the_pieces_of_a_window_in_order() -> None:
    assert merged([(5, 8), (0, 2), (7, 20), (1, 3)], since=1, until=10) == [(1, 3), (5, 10)]
    assert merged([(0, 1), (9, 12)], since=2, until=8) == []


def test_without_cuts_holes_out() -> None:
    assert without([(0, 10), (20, 30)], [(2, 4), (8, 22)]) == [(0, 2), (4, 8), (22, 30)]
    assert without([(0, 10)], [(0, 10)]) == []
    assert without([(0, 10)], []) == [(0, 10)]
