"""Metrics of processes and devices over time: which are shown, on which scale. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nbdist.client.board import palette
from nbdist.client.board.scales import Floats
from nbdist.client.board.scene.scene import Curve, Panel
from nbdist.shared.text import figure, name_bytes

if TYPE_CHECKING:
    from nbdist.client.metrics.telemetry import Series

GetSeries = Callable[[str], "Mapping[int, Series]"]
COLDEST_C = 20.0


def percent(value: float) -> str:
    """Return a share: `97 %`."""
    return f"{value:.0f} %"


def celsius(value: float) -> str:
    """Return a temperature: `64 °C`."""
    return f"{value:.0f} °C"


def watts(value: float) -> str:
    """Return a power: `412 W`."""
    return f"{figure(value)} W"


@dataclass(frozen=True, slots=True)
class Quantity:
    """One number of a record of kind "device".

    `top` returns the end of its scale: of the greatest value seen, and of what the device holds.
    """

    title: str
    color: str
    write: Callable[[float], str]
    top: Callable[[float, float], float]
    floor: float = 0.0


def _cores(most: float, total: float) -> float:
    return 100.0 * max(1, math.ceil(most / 100 - 0.1))  # 105 % of a core is one


def _round_above(most: float, total: float = 0.0) -> float:
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(power * lead for lead in (1, 1.5, 2, 3, 4, 6, 8, 10) if power * lead >= most)


def _of_total(most: float, total: float) -> float:
    return total or _round_above(most)


# By their names in a record, in the order in which they are drawn.
QUANTITIES = {
    "device_pct": Quantity(
        "device use", palette.LINE_COLORS[0], percent, lambda most, total: 100.0
    ),
    "device_bytes": Quantity("device memory in use", palette.LINE_COLORS[3], name_bytes, _of_total),
    "allocated_bytes": Quantity(
        "device memory allocated", palette.LINE_COLORS[3], name_bytes, _of_total
    ),
    "reserved_bytes": Quantity(
        "device memory reserved", palette.LINE_COLORS[3], name_bytes, _of_total
    ),
    "device_c": Quantity(
        "device temperature",
        palette.LINE_COLORS[7],
        celsius,
        lambda most, total: max(100.0, most),
        COLDEST_C,
    ),
    "device_w": Quantity("device power", palette.LINE_COLORS[2], watts, _round_above),
    "cpu_pct": Quantity("processor, of a core", palette.LINE_COLORS[5], percent, _cores),
    "resident_bytes": Quantity("process memory", palette.LINE_COLORS[1], name_bytes, _round_above),
}


def panels(series: GetSeries, total_bytes: float) -> tuple[Panel, ...]:
    """Return each number that any rank has reported, over the seconds since the first report.

    Args:
        series: The history of a key, by rank: `Telemetry.series`, whose steps are seconds here.
        total_bytes: What a device holds at most; 0 where that is not known.
    """
    reported = {key: _curves(series(key)) for key in QUANTITIES}
    begins = [curve.x[0] for curves in reported.values() for curve in curves]
    return tuple(
        _panel(key, curves, min(begins), total_bytes) for key, curves in reported.items() if curves
    )


def _panel(key: str, curves: Sequence[Curve], begin_s: float, total_bytes: float) -> Panel:
    quantity = QUANTITIES[key]
    lines = tuple(Curve(curve.rank, curve.x - begin_s, curve.y) for curve in curves)
    most = max(float(curve.y.max()) for curve in curves)
    top = quantity.top(most, total_bytes)
    return Panel(key, quantity.title, "", lines, quantity.floor, "second", top)


def _curves(by_rank: "Mapping[int, Series]") -> list[Curve]:
    found = []
    for rank, series in sorted(by_rank.items()):
        # Slices: numpy must not hold the arrays themselves, or they could not grow.
        x, y = np.array(series.steps[: series.n]), np.array(series.values[: series.n])
        is_finite: Floats = np.isfinite(y)
        if is_finite.any():
            found.append(Curve(rank, x[is_finite], y[is_finite]))
    return found
