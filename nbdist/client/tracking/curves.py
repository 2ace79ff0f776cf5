"""Keep of a run what comparing runs needs, a few kilobytes that stay when the run has been sent.

`loss` is a curve with a band over the ranks, thinned to `MOST_POINTS`; `end` has each rank's loss
and throughput over its last steps. Plain values of JSON, pure functions.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nbdist.client.telemetry import Series

MOST_POINTS = 400
RECENT = 50

Floats = npt.NDArray[np.float64]


def curves_of(series: Callable[[str], Mapping[int, Series]], first_step: int = 0) -> dict[str, Any]:
    """Return the curves of one cell.

    Args:
        series: The history of a key, by rank: `Telemetry.series`.
        first_step: Added to every step.
    """
    losses = _arrays(series("log.loss")) or _arrays(series("loss"))
    step_s, samples = _arrays(series("step_s")), _arrays(series("samples"))
    return {
        "loss": _banded(losses, first_step),
        "end": {
            "loss": {str(rank): _finite(_recent_mean(y)) for rank, (_, y) in losses.items()},
            "samples_per_s": {
                str(rank): float(np.median(samples[rank][1][-RECENT:]) / usual)
                for rank, (_, y) in step_s.items()
                if rank in samples and (usual := float(np.median(y[-RECENT:]))) > 0
            },
        },
    }


def joined(before: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the curves of a run that goes on with another: its curve before, its own end."""
    if not before:
        return dict(own)
    rows = [*before["loss"], *own["loss"]]
    return {"loss": _thinned(rows), "end": own["end"]}


def _arrays(by_rank: Mapping[int, Series]) -> dict[int, tuple[Floats, Floats]]:
    # Slices first: an array that shares memory with the writer's would make its append fail.
    return {
        rank: (np.array(s.steps[: s.n]), np.array(s.values[: s.n]))
        for rank, s in by_rank.items()
        if s.n
    }


def _recent_mean(values: Floats) -> float:
    """Return the mean of the last steps: one in ten, at most `RECENT`."""
    return float(np.mean(values[-max(1, min(RECENT, len(values) // 10)) :]))


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
    with np.errstate(divide="ignore", invalid="ignore"):
        means = np.where(counts > 0, sums / counts, np.nan)[:, seen]
    rows = []
    for step, column, known in zip(edges[:-1][seen], means.T, counts[:, seen].T > 0, strict=True):
        values = column[known]
        rows.append(
            [
                int(step) + first_step,
                *map(_finite, (float(values.mean()), float(values.min()), float(values.max()))),
            ]
        )
    return rows


def _thinned(rows: list[list[Any]]) -> list[list[Any]]:
    every = -(-len(rows) // MOST_POINTS)
    return rows if every <= 1 else [*rows[:-1:every], rows[-1]]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
