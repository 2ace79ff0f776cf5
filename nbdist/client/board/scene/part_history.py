"""The parts of steps over a whole run, by part and rank: for the interactive board. Pure."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from nbdist.client.board.scales import Floats
from nbdist.client.board.scene.scene import BOTH, Curve, Panel
from nbdist.client.metrics.recent import TOLD, GetSeries

if TYPE_CHECKING:
    from nbdist.client.metrics.telemetry import Series

MOST_MEANS = 500  # points of a line
MOST_VALUES = 16_000  # points of all lines


def parts_over_steps(series: GetSeries) -> tuple[Panel, ...]:
    """Return a panel for each part of a step, with a line a rank; () where none was measured.

    They have the measured steps that all ranks have made; at each the parts, in milliseconds, sum
    to the step. Of many steps each point is the mean of some neighbours.

    Args:
        series: The history of a key, by rank: `Telemetry.series`.
    """
    measured: dict[str, Mapping[int, Series]] = {name: series(key) for name, key in TOLD.items()}
    is_timed = bool(measured["comm"])
    compute = "compute" if is_timed else BOTH
    names = {compute: "compute", "communication": "comm", "data": "data", "optimizer": "optimizer"}
    if not is_timed:
        del names["communication"]
    times = series("step_s")
    ranks = [rank for rank in times if rank in measured["compute"] or rank in measured["comm"]]
    known = {
        rank: {
            name: _read(measured[key][rank]) for name, key in names.items() if rank in measured[key]
        }
        | {"step": _read(times[rank])}
        for rank in ranks
    }
    common = _common([steps for of_rank in known.values() for steps, _ in of_rank.values()])
    if not len(common):
        return ()
    stacked = {rank: _stacked(of_rank, list(names), common) for rank, of_rank in known.items()}
    most = max(20, min(MOST_MEANS, MOST_VALUES // (len(ranks) * (len(names) + 1))))
    x = _means(common, most)
    return tuple(
        Panel(
            name,
            name,
            "ms",
            tuple(Curve(rank, x, _means(stacked[rank][name], most)) for rank in ranks),
            floor=0.0,
        )
        for name in (*names, "other")
    )


def _read(history: "Series") -> tuple[Floats, Floats]:
    """Return the steps, rising, and their values."""
    n = history.n
    return np.array(history.steps[:n]), np.array(history.values[:n])


def _common(steps: list[Floats]) -> Floats:
    """Return the steps that are in all of these; as a rule they are the same."""
    common = steps[0] if steps else np.empty(0)
    for other in steps:
        if not np.array_equal(common, other):
            common = np.intersect1d(common, other)
    return common


def _stacked(
    known: Mapping[str, tuple[Floats, Floats]], names: list[str], steps: Floats
) -> dict[str, Floats]:
    """Return a rank's parts at these steps, and what no part explains; times are in seconds."""

    def at_steps(name: str) -> Floats:
        if name not in known:
            return np.zeros(len(steps))
        known_steps, values = known[name]
        times_ms: Floats = 1e3 * values[np.searchsorted(known_steps, steps, side="right") - 1]
        return times_ms

    parts = {name: at_steps(name) for name in names}
    # Times that are measured separately may exceed the step by an error.
    other = np.maximum(0.0, at_steps("step") - np.sum(list(parts.values()), axis=0))
    return parts | {"other": other}


def _means(values: Floats, most: int) -> Floats:
    """Return the means of neighbours, at most `most` of them; in the digits of float32."""
    size = -(-len(values) // most)
    starts = np.arange(0, len(values), size)
    sums = np.add.reduceat(values, starts)
    means = sums / np.diff([*starts, len(values)])
    return means.astype(np.float32).astype(np.float64)
