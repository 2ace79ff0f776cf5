"""Which steps `--profile` means."""

import pytest

from nbdist.client.metrics.profile.chosen import ChosenSteps, parse_steps
from nbdist.client.notebook.arguments import DEFAULT_STEPS, parse_distributed
from nbdist.shared.errors import UsageError


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [("1", 3, 3), ("5", 3, 7), ("10-14", 10, 14), (" 10 - 14 ", 10, 14), ("1-1", 1, 1)],
)
def test_a_count_follows_a_warm_up_and_a_range_is_taken_as_it_is(
    text: str, first: int, last: int
) -> None:
    assert parse_steps(text) == ChosenSteps(first, last)


@pytest.mark.parametrize("text", ["", "fast", "0", "0-3", "-3", "3-", "1.5", "1-2-3", "²", "1,2"])
def test_what_is_no_count_and_no_range_is_one_line_that_says_what_is_right(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_steps(text)
    assert "\n" not in str(refused.value)
    assert "--profile" in str(refused.value)


def test_a_range_that_runs_backwards_is_told_how_to_write_it() -> None:
    with pytest.raises(UsageError, match="write 3-9"):
        parse_steps("9-3")


def test_too_many_steps_are_refused_before_any_is_recorded() -> None:
    with pytest.raises(UsageError, match="at most 1000"):
        parse_steps("1-100000000")


@pytest.mark.parametrize(
    ("line", "profile"),
    [
        ("", None),
        ("--profile", DEFAULT_STEPS),
        ("--profile=5", "5"),
        ("--profile 10-14 -r 0", "10-14"),
        ("--profile --retry 2", DEFAULT_STEPS),
    ],
)
def test_the_option_stands_alone_or_with_steps(line: str, profile: str | None) -> None:
    asked = parse_distributed(line)
    assert asked is not None
    assert asked.profile == profile


def test_steps_in_words() -> None:
    assert str(parse_steps("3")) == "steps 3-5"
    assert str(parse_steps("7-7")) == "step 7"
