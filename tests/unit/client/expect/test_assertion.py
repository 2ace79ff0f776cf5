"""What `%dist expect` takes, and what it says of what it does not."""

import pytest

from nbdist.client.expect.assertion import Comparison, Phrase, parse
from nbdist.client.notebook.arguments import parse_dist
from nbdist.client.notebook.completion import Values, complete
from nbdist.shared.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("parity", ("parity", 1.0, "")),
        ("parity  model", ("parity", 1.0, "model")),
        ("no alarms", ("no", 1.0, "")),
        ("collectives == last", ("collectives", 1.0, "last")),
        ("collectives==baseline", ("collectives", 1.0, "baseline")),
        ("bytes 1 %", ("bytes", 1.0, "")),
        ("bytes 2.5% of explain", ("bytes", 2.5, "explain")),
        ("step <= 1.1 x baseline", ("step", 1.1, "baseline")),
        ("step_ms < 2*last", ("step", 2.0, "last")),
        ("step <= baseline", ("step", 1.0, "baseline")),
    ],
)
def test_phrases_are_read(text: str, expected: tuple[str, float, str]) -> None:
    assert parse(text) == Phrase(" ".join(text.split()), *expected)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("loss < 0.3", ["final loss"]),
        ("0.1 < loss <= 0.5 * first(loss)", ["final loss", "first loss"]),
        ("max loss < 9", ["max loss"]),
        ("accuracy - 1 >= -0.5", ["final accuracy"]),
        ("collectives == 3", ["final collectives"]),
        ("max loss < 9 and not first < 1", ["max loss", "final first"]),
        ("first and_more < 1", ["first and_more"]),
    ],
)
def test_comparisons_name_what_they_are_about(text: str, names: list[str]) -> None:
    asked = parse(text)
    assert isinstance(asked, Comparison)
    assert list(asked.names) == names


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("loss = 0.3", "write == to compare: loss == 0.3"),
        ("loss", "compare it with a number, as in loss < 0.3"),
        ("loss < 1 and accuracy", "compare it with a number, as in accuracy < 0.3"),
        ("loss ** 9 < 1", "is no number and no name"),
        ("[loss][0] < 1", "is no number and no name"),
        ("(lambda: loss)() < 1", "is not known"),
        ("loss < 1, accuracy > 0", "one assertion a line"),
        ("1 < 2", "it names nothing"),
        ("loss < True", "True is no number and no name"),
        ("bytes == last", "%dist expect bytes 1 %"),
        ("median(loss) < 1", "use final, first"),
        ("model.loss < 1", "is no number and no name"),
        ("loss in (1, 2)", "it is one of loss < 0.3, parity"),
        ("no alarm", "%dist expect no alarms"),
        ("collectives = last", "%dist expect collectives == last"),
        ("step <= 1.1 baseline", "%dist expect step <= 1.1 x baseline"),
        ("bytes one %", "%dist expect bytes 1 %"),
        ("parity of model", "%dist expect parity"),
        ("__import__('os').getpid() > 0", "is not known"),
    ],
)
def test_what_is_no_assertion_is_refused_with_what_is_right(text: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(text)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("line", "text", "value"),
    [
        ('seen == "1"  # a text', 'seen == "1"', "1"),
        ("name == 'max  loss'", "name == 'max  loss'", "max  loss"),
        ("\"seen == '1'\"", "seen == '1'", "1"),
        ('step == "last"', 'step == "last"', "last"),
    ],
)
def test_what_stands_in_quotes_is_a_text(line: str, text: str, value: str) -> None:
    words = parse_dist(f"expect {line}")
    assert words is not None
    asked = parse(" ".join(words.words))
    assert isinstance(asked, Comparison)
    assert asked.text == text
    assert asked.has_text
    assert asked.holds({asked.names[0]: value})
    assert not asked.holds({asked.names[0]: 1.0})


def test_quotes_around_a_whole_assertion_mean_nothing() -> None:
    asked = parse_dist('expect "loss < 0.3"')
    assert asked is not None
    assert asked.words == ["loss < 0.3"]


def test_a_magics_line_is_one_assertion() -> None:
    asked = parse_dist("expect bytes 1 % of explain  # as promised")
    assert asked is not None
    assert " ".join(asked.words) == "bytes 1 % of explain"
    with pytest.raises(UsageError, match="missing: ASSERTION"):
        parse_dist("expect")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%dist expect acc", ["accuracy"]),
        ("%dist expect pari", ["parity"]),
        ("%dist expect no ", ["alarms"]),
        ("%dist expect collectives == ", ["last", "baseline"]),
        ("%dist expect bytes 1 % of e", ["explain"]),
        ("%dist expect max acc", ["accuracy"]),
        ("%dist expect parity la", ["layout"]),
        ("%dist expect loss < ", []),
    ],
)
def test_assertions_complete(text: str, expected: list[str]) -> None:
    values = Values(of_ranks=lambda: ["layout", "_hidden"], metrics=lambda: ["loss", "accuracy"])
    assert complete(text, len(text), values) == expected
