"""Keep of a run what comparing runs needs, a few kilobytes that stay when the run has been sent.

`loss` is a curve with a band over the ranks, thinned to `MOST_POINTS`; `end` has each rank's loss,
throughput (with the error that the steps tell), the mean time of a step, and its exposed
communication, over the last steps. Plain values of JSON, pure functions.

Losses are compared over the same steps, up to the last that all runs have made: a run that was
interrupted, or resumed, has made other steps than its neighbours, and a loss falls with steps. The
error of a mean over steps comes from how they lie about their line: ranks that see the same batches
agree to the last digit, and their spread says nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nbdist.client.metrics.analysis.values import RECENT
from nbdist.client.metrics.recent import GetSeries, losses, recent_steps
from nbdist.client.metrics.telemetry import Series

MOST_POINTS = 400
_FEW = 10  # steps, of which the last one tells more than a mean
_FEWEST = 5  # points that a spread over steps takes at least
_FEWEST_ROWS = 10  # of a thinned curve in a window

Floats = npt.NDArray[np.float64]
Curve = Sequence[Sequence[Any]]


def curves_of(series: GetSeries, first_step: int = 0) -> dict[str, Any]:
    """Return the curves of one cell.

    Args:
        series: The history of a key, by rank: `Telemetry.series`.
        first_step: Added to every step.
    """
    return {"loss": _banded(_losses(series), first_step), "end": end_of(series)}


def end_of(series: GetSeries) -> dict[str, dict[str, float | None]]:
    """Return what each rank's last steps were like, as `metrics.recent` defines it.

    The error of throughput is what the steps tell; ranks that know nothing of a number are out.
    """
    recent = recent_steps(series)
    rates = {r: steps.per_s["samples"] for r, steps in recent.items() if "samples" in steps.per_s}
    return {
        "loss": _named({r: _finite(_recent_mean(y)) for r, (_, y) in _losses(series).items()}),
        "samples_per_s": _named(rates),
        "samples_per_s_error": _named(
            {r: v * _error(recent[r].times_ms) for r, v in rates.items()}
        ),
        "step_ms": _named({r: steps.step_ms for r, steps in recent.items()}),
        "comm_ms": _named({r: s.parts["comm"] for r, s in recent.items() if "comm" in s.parts}),
    }


def joined(before: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the curves of a run that goes on with another: its curve before, its own end.

    Of steps that both have, those of its own stand.
    """
    if not before:
        return dict(own)
    first = own["loss"][0][0] if own["loss"] else math.inf
    rows = [*(row for row in before["loss"] if row[0] < first), *own["loss"]]
    return {"loss": _thinned(rows), "end": own["end"]}


@dataclass(frozen=True, slots=True)
class StepRange:
    """Steps `first` to `last`, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        if self.first == self.last:
            return f"step {self.last}"
        return f"the mean of steps {self.first} to {self.last}"


def window_of(curves: Iterable[Curve]) -> StepRange | None:
    """Return the steps that these runs are compared over: half of them, `RECENT` as a rule.

    None when no curve has steps. A curve that was thinned needs a longer window.
    """
    known = [curve for curve in curves if has_steps(curve)]
    if not known:
        return None
    last = min(int(curve[-1][0]) for curve in known)
    spacing = max(-(-int(c[-1][0] - c[0][0]) // (len(c) - 1)) for c in known)
    # Of a handful of steps no spread is known, and half of them would be the start's.
    half = last // 2 if last >= 2 * _FEWEST else 1
    length = min(max(RECENT, _FEWEST_ROWS * spacing), half)
    return StepRange(last - length + 1, last)


def has_steps(curve: Curve) -> bool:
    """Return whether a curve goes over steps; what is logged without an optimizer stays at 0."""
    return len(curve) > 1


def loss_over(curve: Curve, window: StepRange) -> tuple[float, float | None] | None:
    """Return the mean of a curve over a window, and its error: two standard errors over the steps.

    A curve that ends before the window gives its own last steps. The error is None for less than
    `_FEWEST` points; all is None where the loss was no number.
    """
    late = window.last - max(window.last - int(curve[-1][0]), 0)
    first = window.first - (window.last - late)
    rows = [row for row in curve if first <= row[0] <= late] or [curve[-1]]
    values = [row[1] for row in rows]
    if any(value is None for value in values):
        return None
    return float(np.mean(values)), _error_about_line([row[0] for row in rows], values)


def _error_about_line(steps: Sequence[float], values: Sequence[float]) -> float | None:
    n = len(values)
    if n < _FEWEST:
        return None
    x = np.asarray(steps, dtype=np.float64) - np.mean(steps)
    y = np.asarray(values, dtype=np.float64) - np.mean(values)
    # About the line through them: that a loss falls is no chance.
    rest = y - x * (x @ y) / (x @ x)
    return 2 * math.sqrt(float(rest @ rest) / (n - 2) / n)


def _arrays(by_rank: Mapping[int, Series]) -> dict[int, tuple[Floats, Floats]]:
    # Slices first: an array that shares memory with the writer's would make its append fail.
    return {
        rank: (np.array(s.steps[: s.n]), np.array(s.values[: s.n]))
        for rank, s in by_rank.items()
        if s.n
    }


def _losses(series: GetSeries) -> dict[int, tuple[Floats, Floats]]:
    return _arrays(losses(series))


def _recent_mean(values: Floats) -> float:
    """Return the mean of the last steps: half of them, at most `RECENT`; of a few one."""
    half = len(values) // 2 if len(values) >= _FEW else 1
    return float(np.mean(values[-min(RECENT, half) :]))


def _error(times: Floats) -> float:
    """Return two standard errors of these times' mean, as a share of it; 0 for one time."""
    if len(times) < 2:
        return 0.0
    return float(2 * times.std(ddof=1) / math.sqrt(len(times)) / times.mean())


def _named(by_rank: Mapping[int, float | None]) -> dict[str, float | None]:
    return {str(rank): value for rank, value in by_rank.items()}


def _banded(losses: Mapping[int, tuple[Floats, Floats]], first_step: int) -> list[list[Any]]:
    """Return rows of (step, mean, lowest, highest) over ranks; None stands for no number."""
    if not losses:
        return []
    low = min(x[0] for x, _ in losses.values())
    high = max(x[-1] for x, _ in losses.values())
    edges = np.unique(np.linspace(low, high + 1, MOST_POINTS + 1).astype(np.int64))
    sums = np.zeros((len(losses), len(edges) - 1))
    counts = np.zeros_like(sums)
    for row, (x, y) in enumerate(losses.values()):
        place = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, len(edges) - 2)
        sums[row] = np.bincount(place, y, len(edges) - 1)
        counts[row] = np.bincount(place, None, len(edges) - 1)
    seen = counts.any(axis=0)
    sums, is_known = sums[:, seen], counts[:, seen] > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        means = np.where(is_known, sums / counts[:, seen], np.nan)
        mean = means.sum(axis=0, where=is_known) / is_known.sum(axis=0)
    # A rank's NaN is the band's: of the ranks without a step in a place nothing is known there.
    low_of = means.min(axis=0, where=is_known, initial=np.inf)
    high_of = means.max(axis=0, where=is_known, initial=-np.inf)
    steps = (edges[:-1][seen] + first_step).tolist()
    columns = [[_finite(value) for value in of.tolist()] for of in (mean, low_of, high_of)]
    return [list(row) for row in zip(steps, *columns, strict=True)]


def _thinned(rows: list[list[Any]]) -> list[list[Any]]:
    every = -(-len(rows) // MOST_POINTS)
    return rows if every <= 1 else [*rows[:-1:every], rows[-1]]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
