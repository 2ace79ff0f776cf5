"""Tables as lines of text."""

from nbdist.columns import aligned


def test_columns_stand_below_each_other_and_lines_end_with_their_words() -> None:
    assert aligned([["rank", "state"], ["0", ""], ["10", "idle"]]) == [
        "rank  state",
        "0",
        "10    idle",
    ]


def test_columns_to_the_right_end_on_one_line() -> None:
    assert aligned([["a", "ms"], ["bb", "12.5"]], (False, True)) == ["a     ms", "bb  12.5"]


def test_no_rows_are_no_lines() -> None:
    assert aligned([]) == []
