"""Which steps of a cell were left out as not finite, as far as they can be looked into. Pure."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from nbdist.shared.wire import MOST_LEFT_OUT

if TYPE_CHECKING:
    from nbdist.client.metrics.telemetry import Series


def left_out_steps(counts: "Mapping[int, Series]") -> list[int]:
    """Return the newest steps that any rank has left out: those of which it keeps evidence.

    Args:
        counts: By rank, how many it had left out by each of them.
    """
    steps = {step for series in counts.values() for step in _of_rank(series)}
    return sorted(steps)[-MOST_LEFT_OUT:]


def _of_rank(series: "Series") -> Iterator[int]:
    """Return the steps at which the count rises by one, or begins anew as of a cell run again.

    A number that a cell logs by this name does something else.
    """
    before = 0.0
    for step, count in zip(series.steps[: series.n], series.values[: series.n], strict=True):
        if count in (before + 1, 1.0):
            yield int(step)
        before = count
