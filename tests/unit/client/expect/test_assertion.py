"""What `%dist expect` takes, and what it says of what it does not."""

import pytest

from nbdist.client.expect.assertion import (
    BytesWithin,
    LayoutParity,
    NoAlarms,
    Numbers,
    SameCollectives,
    SameText,
    StepWithin,
    parse,
)
from nbdist.client.notebook.arguments import parse_dist
from nbdist.client.notebook.completion import Values, complete
from nbdist.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("parity", LayoutParity(None)),
        ("parity  model", LayoutParity("model")),
        ("no alarms", NoAlarms()),
        ("collectives == last", SameCollectives("last")),
        ("collectives==baseline", SameCollectives("baseline")),
        ("bytes 1 %", BytesWithin(0.01, "last")),
        ("bytes 2.5% of explain", BytesWithin(0.025, "explain")),
        ("step <= 1.1 x baseline", StepWithin(1.1, "baseline")),
        ("step_ms < 2*last", StepWithin(2.0, "last")),
        ("step <= baseline", StepWithin(1.0, "baseline")),
    ],
)
def test_assertions_of_runs_are_read(text: str, expected: object) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("loss < 0.3", [("final", "loss")]),
        ("0.1 < loss <= 0.5 * first(loss)", [("final", "loss"), ("first", "loss")]),
        ("max loss < 9", [("max", "loss")]),
        ("accuracy - 1 >= -0.5", [("final", "accuracy")]),
        ("collectives == 3", [("final", "collectives")]),
    ],
)
def test_comparisons_name_what_they_are_about(text: str, names: list[tuple[str, str]]) -> None:
    asked = parse(text)
    assert isinstance(asked, Numbers)
    assert list(asked.names) == names


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("loss = 0.3", "write == to compare: loss == 0.3"),
        ("loss", "compare it with a number, as in loss < 0.3"),
        ("loss < 1 and accuracy > 0", "one assertion a line"),
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
    ("line", "expected"),
    [
        ('seen == "1"  # a text', SameText('seen == "1"', "seen", "1", True)),
        ("name != 'max  loss'", SameText("name != 'max  loss'", "name", "max  loss", False)),
        ("\"seen == '1'\"", SameText("seen == '1'", "seen", "1", True)),
    ],
)
def test_what_stands_in_quotes_is_a_text(line: str, expected: SameText) -> None:
    asked = parse_dist(f"expect {line}")
    assert asked is not None
    assert parse(" ".join(asked.words)) == expected
    assert isinstance(parse("seen == 1"), Numbers)


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
