"""The rounds of a ring all_reduce."""

from itertools import pairwise

import pytest

from nbdist.study.ring import rounds_of


@pytest.mark.parametrize("n", [2, 3, 4, 9])
def test_after_all_rounds_each_rank_has_the_sum_of_all_parts(n: int) -> None:
    states = rounds_of(n)
    assert len(states) == 2 * (n - 1) + 1
    assert states[0] == [[1] * n] * n
    assert states[-1] == [[n] * n] * n


@pytest.mark.parametrize("n", [2, 3, 4, 9])
def test_after_half_of_them_each_rank_has_one_whole_sum_and_each_another(n: int) -> None:
    half = rounds_of(n)[n - 1]
    assert all(row.count(n) == 1 for row in half)
    assert {row.index(n) for row in half} == set(range(n))


def test_in_each_round_each_rank_gets_one_part() -> None:
    states = rounds_of(5)
    for before, after in pairwise(states):
        rows = zip(before, after, strict=True)
        assert [sum(a != b for a, b in zip(x, y, strict=True)) for x, y in rows] == [1] * 5
