"""Numbers as people read them."""

import math

import pytest

from nbdist.shared.text import aligned, counted, figure, milliseconds, name_bytes, name_rate


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (4, "4 B"),
        (999, "999 B"),
        (4000, "4.0 kB"),
        (32_000, "32 kB"),
        (815_872, "816 kB"),
        (999_499, "999 kB"),
        (999_999, "1.0 MB"),
        (8_400_000, "8.4 MB"),
        (9_970_000, "10 MB"),
        (7e12, "7.0 TB"),
        (7e15, "7,000 TB"),
    ],
)
def test_bytes_are_named_by_powers_of_ten(size: float, text: str) -> None:
    assert name_bytes(size) == text


def test_things_are_counted_in_the_singular_and_the_plural() -> None:
    assert [counted(n, "step") for n in (0, 1, 1240)] == ["0 steps", "1 step", "1,240 steps"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.12649, "0.126"),
        (12.34, "12.3"),
        (1234.0, "1,234"),
        (3.1e-5, "3.1e-05"),
        (0.0, "0"),
        (617_227_517_952.0, "6.2e+11"),
    ],
)
def test_figures_have_about_three_digits(value: float, shown: str) -> None:
    assert figure(value) == shown


@pytest.mark.parametrize(("ms", "said"), [(3.8e-4, "0"), (0.0126, "0.013"), (12.34, "12.3")])
def test_times_are_read_down_to_a_microsecond(ms: float, said: str) -> None:
    assert milliseconds(ms) == said


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [(4.116e9, "4.12 GB/s"), (9.6e8, "960 MB/s"), (5.56e7, "55.6 MB/s"), (2e4, "20.0 kB/s")],
)
def test_rates_are_named_by_powers_of_ten(bytes_per_s: float, text: str) -> None:
    assert name_rate(bytes_per_s) == text


def test_what_is_no_number_is_said_to_be_not_finite() -> None:
    assert {write(math.nan) for write in (figure, milliseconds, name_bytes)} == {"not finite"}


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
