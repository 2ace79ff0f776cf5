"""Which names `%dist expect` knows, and what it offers for one that it does not."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from nbdist.client.expect.expect import expect, metric_names
from nbdist.client.metrics.telemetry import Telemetry
from nbdist.shared.errors import ExpectationError, TransferError, UsageError
from nbdist.shared.wire import Batch, Record


def trained() -> Any:
    """Return a training of 20 steps on one rank."""
    telemetry = Telemetry()
    records = (Record(0, n, "step", n + 1, n, {"loss": 0.5, "step_s": 0.02}) for n in range(20))
    telemetry.receive(Batch(0, tuple(records), {}))
    return SimpleNamespace(telemetry=telemetry, cut_off="")


def test_a_step_is_offered_in_the_unit_that_people_know() -> None:
    def pull(name: str) -> None:
        raise TransferError(f"there is no variable {name}")

    training = trained()
    assert metric_names(training) == ["loss", "step_ms"]
    session = cast("Any", SimpleNamespace(trained=training, pull=pull))
    with pytest.raises(UsageError, match=r"step is neither .*; did you mean step_ms\?"):
        expect(session, "step < 100")


def expect_of(value: list[object], assertion: str) -> str:
    """Expect something of a variable that is this on the ranks."""
    session = cast("Any", SimpleNamespace(trained=None, pull=lambda name: value))
    return expect(session, assertion)


def test_a_text_is_compared_with_texts_alone() -> None:
    asked = 'seen == "1"'
    assert expect_of(["1", "1"], asked) == f"{asked} holds: seen is '1' on all ranks."
    with pytest.raises(ExpectationError, match="hold on rank 1: seen is '1' on rank 0, 1 on rank"):
        expect_of(["1", 1], asked)
    with pytest.raises(ExpectationError, match="hold on ranks 0-1: seen is 1 on all"):
        expect_of([1, 1], asked)
    assert "holds" in expect_of(["2", 1, None], 'seen != "1"')


def test_texts_and_numbers_have_no_order() -> None:
    with pytest.raises(UsageError, match="of a text and a number is none the greater"):
        expect_of([1, 1], 'seen < "1"')
    with pytest.raises(UsageError, match="compares numbers, and seen is a str"):
        expect_of(["1", "1"], "seen < 1")
