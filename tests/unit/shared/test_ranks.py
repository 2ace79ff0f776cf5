"""Sets of ranks, as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.shared.errors import UsageError
from nbdist.shared.text import begin_with_ranks, name_ranks, parse_ranks


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("all", (0, 1, 2, 3)),
        (" all ", (0, 1, 2, 3)),
        ("0", (0,)),
        ("0,2", (0, 2)),
        ("1-3", (1, 2, 3)),
        ("3,0-1,1", (0, 1, 3)),
        ("2-2", (2,)),
        ("0, 1", (0, 1)),
    ],
)
def test_ranks_are_read(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text, 4) == ranks


@pytest.mark.parametrize("text", ["", "-1", "a", "1-", "-", "1,,2", "1..2", "0x1", "1 2", "²"])
def test_what_is_no_set_of_ranks_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match="RANKS is all, 0, 0,2 or 1-3"):
        parse_ranks(text, 4)


def test_a_rank_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(UsageError, match=r"There is no rank 5: this cluster has ranks 0-3\."):
        parse_ranks("0,4-5", 4)


def test_a_range_that_runs_backwards_is_turned_round() -> None:
    with pytest.raises(UsageError, match="write 1-3"):
        parse_ranks("3-1", 4)


def test_a_range_that_is_far_too_long_is_refused_at_once() -> None:
    with pytest.raises(UsageError):
        parse_ranks("0-999999999999", 4)


@given(st.sets(st.integers(0, 99), min_size=1))
def test_what_is_named_reads_back(ranks: set[int]) -> None:
    text = name_ranks(ranks).split(" ", 1)[1]
    assert set(parse_ranks(text.replace(" ", ""), 100)) == ranks


def test_a_sentence_begins_with_ranks_in_the_right_number() -> None:
    assert begin_with_ranks([2], be=True) == "Rank 2 is"
    assert begin_with_ranks([0, 1, 3], be=True) == "Ranks 0-1, 3 are"
    assert begin_with_ranks([1]) == "Rank 1"
