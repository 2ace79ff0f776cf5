"""Which names `%dist expect` knows, and what it offers for one that it does not."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from nbdist.client.expect.expect import expect, metric_names
from nbdist.client.metrics.telemetry import Telemetry
from nbdist.errors import TransferError, UsageError
from nbdist.wire import Batch, Record


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
