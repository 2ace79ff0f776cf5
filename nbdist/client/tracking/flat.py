"""One step of many ranks as the few numbers that runs are sorted and compared by. Pure.

- `loss`: the mean over the ranks;
- `grad_norm`: of the whole gradient, where ranks tell their shares of it;
- `expert_imbalance`: the tokens of the rank whose experts got most, in times of an even share.

What recent steps were like, such as `step_ms` and `comm_pct`, is `metrics.recent`'s.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

# A rank's own series: their names in MLflow, what they are in a record, and times how much.
MEASURED_BY_RANK = {
    "loss": ("loss", 1.0),
    "comm_ms": ("comm_s", 1e3),
    "step_ms": ("step_s", 1e3),
    "data_ms": ("data_s", 1e3),
}

# Likewise of its process and device. Where the charts of all are too many for the view that MLflow
# opens with (`view.py`), the last have none.
MEASURED_BY_DEVICE = {
    "cpu_pct": ("cpu_pct", 1.0),
    "resident_mb": ("resident_bytes", 1e-6),
    "device_pct": ("device_pct", 1.0),
    "device_mb": ("device_bytes", 1e-6),
    "device_c": ("device_c", 1.0),
    "device_w": ("device_w", 1.0),
    "device_allocated_mb": ("allocated_bytes", 1e-6),
    "device_reserved_mb": ("reserved_bytes", 1e-6),
    "device_peak_mb": ("peak_bytes", 1e-6),
    "device_total_mb": ("device_total_bytes", 1e-6),
}


def flat_values(by_rank: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return the flat values of one step from each rank's own; what no rank measured is absent."""
    rows = list(by_rank.values())
    losses = _known(rows, "loss")
    shares = _known(rows, "grad_share")
    values: dict[str, float] = {}
    if losses:
        values["loss"] = mean(losses)
    if shares and len(shares) == len(rows):
        squared = sum(shares)
        values["grad_norm"] = math.sqrt(squared) if squared >= 0 else math.nan
    loads = [r["expert_tokens"] / r["expert_even"] for r in rows if r.get("expert_even")]
    if loads:
        values["expert_imbalance"] = max(loads)
    return values


def of_rank(values: Mapping[str, float]) -> dict[str, float]:
    """Return a rank's own values of a step by their names; without a loader no time for data."""
    return {
        name: factor * values[key]
        for name, (key, factor) in MEASURED_BY_RANK.items()
        if key in values and (key != "data_s" or values[key] > 0)
    }


def of_device(values: Mapping[str, float]) -> dict[str, float]:
    """Return what a record of a rank's device tells by its names in MLflow."""
    return {
        name: factor * values[key]
        for name, (key, factor) in MEASURED_BY_DEVICE.items()
        if key in values
    }


def spread(quantity: str, by_rank: Mapping[int, float]) -> dict[str, float]:
    """Return least, median and greatest of a quantity, and the rank of the greatest."""
    if not by_rank:
        return {}
    finite = {r: v for r, v in by_rank.items() if not math.isnan(v)}
    # A rank whose loss is NaN is the one to look at.
    top = max(finite or by_rank, key=lambda r: by_rank[r])
    if len(finite) < len(by_rank):
        top = min(by_rank.keys() - finite.keys())
    ordered = sorted(finite.values()) or [math.nan]
    return {
        f"rank_{quantity}/min": ordered[0],
        f"rank_{quantity}/median": statistics.median(ordered),
        f"rank_{quantity}/max": by_rank[top],
        f"rank_{quantity}/argmax": float(top),
    }


def mean(values: Iterable[float]) -> float:
    """Return the mean; infinities of both signs give NaN, where `statistics.fmean` raises."""
    known = list(values)
    return sum(known) / len(known)


def _known(rows: Sequence[Mapping[str, float]], key: str) -> list[float]:
    return [row[key] for row in rows if key in row]
