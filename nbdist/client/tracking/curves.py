"""Keep of a run what comparing runs needs, a few kilobytes that stay when the run has been sent.

`loss` is a curve with a band over the ranks, thinned to `MOST_POINTS`; `end` has, over each rank's
last steps, its loss, throughput (with the error that the steps tell) and the mean and median of a
step's time. Plain values of JSON, pure functions.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nbdist.client.metrics.telemetry import Series

MOST_POINTS = 400
RECENT = 50
_FEW = 10  # steps, of which the last one tells more than a mean

Floats = npt.NDArray[np.float64]


def curves_of(series: Callable[[str], Mapping[int, Series]], first_step: int = 0) -> dict[str, Any]:
    """Return the curves of one cell.

    Args:
        series: The history of a key, by rank: `Telemetry.series`.
        first_step: Added to every step.
    """
    return {"loss": _banded(_losses(series), first_step), "end": end_of(series)}


def end_of(series: Callable[[str], Mapping[int, Series]]) -> dict[str, dict[str, float | None]]:
    """Return what each rank's last steps were like; see `curves_of`.

    Throughput is what was done over the time it took, so a step that is long now and then counts.
    """
    times = {rank: _settled(y) for rank, (_, y) in _arrays(series("step_s")).items()}
    times = {rank: y for rank, y in times.items() if y.mean() > 0}
    samples = {
        rank: float(y[-RECENT:].mean() / times[rank].mean())
        for rank, (_, y) in _arrays(series("samples")).items()
        if rank in times
    }
    return {
        "loss": _named({r: _finite(_recent_mean(y)) for r, (_, y) in _losses(series).items()}),
        "samples_per_s": _named(samples),
        "samples_per_s_error": _named({r: v * _error(times[r]) for r, v in samples.items()}),
        "step_s": _named({rank: float(y.mean()) for rank, y in times.items()}),
        "step_median_s": _named({rank: float(np.median(y)) for rank, y in times.items()}),
    }


def end_values(end: Mapping[str, Mapping[str, float | None]]) -> dict[str, float]:
    """Return what `end_of` tells of a run in the names of `flat`; ranks that know nothing are out.

    Times are means over the ranks, throughput is that of all.
    """
    known = {key: [v for v in by_rank.values() if v is not None] for key, by_rank in end.items()}
    values = {
        key: float(np.mean(known[key])) for key in ("step_s", "step_median_s") if known.get(key)
    }
    if known.get("samples_per_s"):
        values["samples_per_s"] = sum(known["samples_per_s"])
    return values


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


def _losses(
    series: Callable[[str], Mapping[int, Series]],
) -> dict[int, tuple[Floats, Floats]]:
    return _arrays(series("log.loss")) or _arrays(series("loss"))


def _recent_mean(values: Floats) -> float:
    """Return the mean of the last steps: half of them, at most `RECENT`; of a few one."""
    half = len(values) // 2 if len(values) >= _FEW else 1
    return float(np.mean(values[-min(RECENT, half) :]))


def _settled(step_s: Floats) -> Floats:
    """Return the last steps' times; the first one compiles, and tells of no other."""
    return step_s[1:][-RECENT:] if len(step_s) > 1 else step_s


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
