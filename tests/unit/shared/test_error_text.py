"""The text of an exception that will not be told."""

import pytest

from nbdist.shared.error_text import FAILED, MOST_CHARS, ToldError, named, text_of


class Odd(Exception):
    """Its text is what a test says, or raises."""

    def __init__(self, said: object) -> None:
        super().__init__()
        self.said = said

    def __str__(self) -> str:
        if isinstance(self.said, BaseException):
            raise self.said
        return self.said  # type: ignore[return-value]


@pytest.mark.parametrize("said", [ValueError("no"), KeyboardInterrupt(), SystemExit(1), 7])
def test_what_cannot_be_told_is_named_by_its_type(said: object) -> None:
    assert text_of(Odd(said)) == FAILED
    assert named(Odd(said)) == f"Odd: {FAILED}"


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    text = text_of(Odd("begin" + "x" * 1_000_000 + "end"))
    assert len(text) < MOST_CHARS + 100
    assert text.startswith("begin")
    assert text.endswith("end")
    assert "[... 984,008 characters ...]" in text


def test_a_lone_surrogate_is_written_as_in_a_literal() -> None:
    text = text_of(ValueError("bad \udcff \ud800 \N{SNOWMAN}"))
    assert text == "bad \\udcff \\ud800 \N{SNOWMAN}"
    assert text.encode().decode() == text


def test_what_stands_for_an_error_has_its_name_its_text_and_its_notes() -> None:
    error = Odd("said")
    error.add_note("and more")
    told = ToldError.of(error)
    assert (type(told).__name__, str(told), told.__notes__) == ("Odd", "said", ["and more"])
    assert told.__cause__ is error
