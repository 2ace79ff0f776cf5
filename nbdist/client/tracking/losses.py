"""The loss of runs where they can be compared: over the same steps, up to the last all have made.

A run that was interrupted, or resumed, has made other steps than its neighbours, and a loss falls
with steps. What a mean over steps might as well have been is told by how the steps lie about their
line: ranks that see the same batches agree to the last digit, and their spread says nothing. Pure.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbdist.client.metrics.analysis.values import RECENT

FEWEST = 5  # points that a spread over steps is told from
_FEWEST_ROWS = 10  # of a thinned curve in a window

Curve = Sequence[Sequence[Any]]


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
    # Of a handful of steps no spread can be told, and half of them would be the start's.
    half = last // 2 if last >= 2 * FEWEST else 1
    length = min(max(RECENT, _FEWEST_ROWS * spacing), half)
    return StepRange(last - length + 1, last)


def has_steps(curve: Curve) -> bool:
    """Return whether a curve goes over steps; what is logged without an optimizer stays at 0."""
    return len(curve) > 1


def loss_over(curve: Curve, window: StepRange) -> tuple[float, float | None] | None:
    """Return the mean of a curve over a window, and its error: two standard errors over the steps.

    A curve that ends before the window gives its own last steps. The error is None for less than
    `FEWEST` points; all is None where the loss was no number.
    """
    late = window.last - max(window.last - int(curve[-1][0]), 0)
    first = window.first - (window.last - late)
    rows = [row for row in curve if first <= row[0] <= late] or [curve[-1]]
    values = [row[1] for row in rows]
    if any(value is None for value in values):
        return None
    return float(np.mean(values)), _error([row[0] for row in rows], values)


def _error(steps: Sequence[float], values: Sequence[float]) -> float | None:
    n = len(values)
    if n < FEWEST:
        return None
    x = np.asarray(steps, dtype=np.float64) - np.mean(steps)
    y = np.asarray(values, dtype=np.float64) - np.mean(values)
    # About the line through them: that a loss falls is no chance.
    rest = y - x * (x @ y) / (x @ x)
    return 2 * math.sqrt(float(rest @ rest) / (n - 2) / n)
