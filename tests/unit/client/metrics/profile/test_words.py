"""What is said of a profile."""

import pytest

from nbdist.client.metrics.profile.chosen import ChosenSteps
from nbdist.client.metrics.profile.words import what_was_recorded

CHOSEN = ChosenSteps(3, 5)


def said(
    recorded: dict[int, tuple[list[int], str]],
    missing: dict[int, str] | None = None,
    made: int = 20,
) -> str:
    return what_was_recorded(CHOSEN, recorded, missing or {}, made)


@pytest.mark.parametrize(
    ("steps", "end", "made", "words"),
    [
        ([3, 4, 5], "steps", 20, "Steps 3-5 were recorded, which adds overhead."),
        ([3, 4], "cell", 4, "Of steps 3-5, steps 3-4 were recorded, then the cell ended."),
        ([3], "limit", 9, "Of steps 3-5, step 3 was recorded, then recording ended because it "),
        ([], "cell", 2, "Step 3 was recorded until the cell ended."),
        ([], "cell", 0, "The cell made no step, so all of it was recorded."),
        ([], "limit", 0, "The cell made no step, so only its beginning was recorded."),
    ],
)
def test_what_there_is_and_why_it_is_not_more(
    steps: list[int], end: str, made: int, words: str
) -> None:
    assert said({0: (steps, end), 1: (steps, end)}, made=made).startswith(words)


def test_ranks_without_a_trace_are_named_with_the_reason() -> None:
    text = said({0: ([3, 4, 5], "steps")}, {1: "it has ended", 3: "it has ended", 2: ""})
    assert "Ranks 1, 3 recorded no trace (it has ended)." in text
    assert "Rank 2 recorded no trace." in text


def test_nothing_at_all_is_said_with_the_reason() -> None:
    assert said({}, {0: "", 1: ""}, made=2) == (
        "The cell ended after 2 steps, so steps 3-5 could not be recorded."
    )
    assert said({}, {0: "RuntimeError: no", 1: "RuntimeError: no"}) == (
        "Nothing was recorded: RuntimeError: no."
    )
