"""One step of many ranks as the few numbers that runs are sorted and compared by. Pure.

- `loss`, `step_s`: means over the ranks; `samples_per_s`, `tokens_per_s`: of all ranks together;
- `comm_pct`: exposed communication, `wait_pct`: waiting for other ranks, as shares of the step;
- `skew_ms`: the greatest time between the first and the last rank's arrival at a collective;
- `grad_norm`: of the whole gradient, where ranks tell their shares of it.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from nbdist.client.metrics.analysis.values import ExplainedStep

MEASURED_BY_RANK = ("loss", "comm_s", "step_s", "data_s")
BY_RANK = (*MEASURED_BY_RANK, "wait_s")


def flat_values(by_rank: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return the flat values of one step from each rank's own; what no rank measured is absent."""
    rows = list(by_rank.values())
    losses = _known(rows, "loss")
    step_s = _known(rows, "step_s")
    timed = [r for r in rows if "step_s" in r and "comm_s" in r]
    shares = _known(rows, "grad_share")
    values: dict[str, float] = {}
    if losses:
        values["loss"] = mean(losses)
    if step_s:
        values["step_s"] = mean(step_s)
    for key in ("samples", "tokens"):
        done = _known(rows, key)
        if done and step_s and max(step_s) > 0:
            values[f"{key}_per_s"] = sum(done) / max(step_s)
    if timed and (whole := sum(r["step_s"] for r in timed)) > 0:
        values["comm_pct"] = 100 * sum(r["comm_s"] for r in timed) / whole
    if shares and len(shares) == len(rows):
        squared = sum(shares)
        values["grad_norm"] = math.sqrt(squared) if squared >= 0 else math.nan
    return values


def skew_estimate_ms(by_rank: Mapping[int, Mapping[str, float]]) -> float | None:
    """Return how much longer the slowest rank worked than the fastest, waiting left out.

    An estimate for steps whose collectives nobody has put beside each other; None for one rank.
    """
    worked = [
        r["step_s"] - r["comm_s"] for r in by_rank.values() if "step_s" in r and "comm_s" in r
    ]
    return 1000 * (max(worked) - min(worked)) if len(worked) > 1 else None


def explained_values(step: ExplainedStep, step_s: Mapping[int, float]) -> dict[str, float]:
    """Return the flat values that only the comparison of all ranks tells.

    Args:
        step: What `CellAnalysis` found.
        step_s: How long the step took, by rank, as far as that is known.
    """
    values: dict[str, float] = {}
    if step.skew_ms is not None:
        values["skew_ms"] = step.skew_ms
    both = step.waiting_ms.keys() & step_s.keys()
    if both and (whole_ms := 1000 * sum(step_s[rank] for rank in both)) > 0:
        values["wait_pct"] = 100 * sum(step.waiting_ms[rank] for rank in both) / whole_ms
    return values


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


def worth_keeping(quantity: str, values: Mapping[str, float]) -> bool:
    """Return whether a rank's own value of `quantity` is a point: no loader, no data time."""
    return quantity in values and (quantity != "data_s" or values[quantity] > 0)


def mean(values: Iterable[float]) -> float:
    """Return the mean; infinities of both signs give NaN, where `statistics.fmean` raises."""
    known = list(values)
    return sum(known) / len(known)


def _known(rows: Sequence[Mapping[str, float]], key: str) -> list[float]:
    return [row[key] for row in rows if key in row]
