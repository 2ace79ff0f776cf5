"""What a training's recent steps were like: each number that is shown of them, defined once.

Board, tables of runs, comparisons and MLflow read these numbers and work out none of their own.
`docs/tracking.md` has the definitions as a table. Milliseconds; pure; any thread.

*Recent* are a rank's last `RECENT` measured steps and all between them, without the cell's first,
which connects and compiles. The time of a step is the mean of all of these. What it is made of is
known of the measured ones (`wire.is_measured`): their shares stand for the others.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nbdist.client.metrics.analysis.values import RECENT, RankStep

if TYPE_CHECKING:
    from nbdist.client.metrics.telemetry import Series

TOLD = {"compute": "compute_s", "comm": "comm_s", "data": "data_s", "optimizer": "optimizer_s"}
# What the loader's batches took to make, of workers too: it may be more than the step.
MAKING = {part: f"{part}_s" for part in ("read", "decode", "transform", "fetch", "collate", "copy")}

Floats = npt.NDArray[np.float64]
GetSeries = Callable[[str], "Mapping[int, Series]"]


@dataclass(frozen=True, slots=True, eq=False)
class RecentSteps:
    """One rank's recent steps.

    `step_ms` is their mean, `times_ms` all of them. `parts` has, by the names of `TOLD`, what the
    rank told of them, in milliseconds per step; `comm` is exposed, and part of `compute` where
    communication was not measured. `per_s` has samples and tokens, where a loader told them.
    `making` has, by the names of `MAKING`, the work of making the batches of a step, milliseconds,
    where an `nbdist.loader` told it; the loop waited for `parts["data"]` of it.
    """

    step_ms: float
    times_ms: Floats
    parts: Mapping[str, float]
    per_s: Mapping[str, float] = field(default_factory=dict)
    making: Mapping[str, float] = field(default_factory=dict)

    @property
    def other_ms(self) -> float:
        """What no part explains; times that are measured apart may exceed the step by an error."""
        return max(0.0, self.step_ms - sum(self.parts.values()))


def recent_steps(series: GetSeries) -> dict[int, RecentSteps]:
    """Return the recent steps of each rank that has made any.

    Args:
        series: The history of a key, by rank: `Telemetry.series`.
    """
    known = {name: series(key) for name, key in TOLD.items()}
    made = {name: series(key) for name, key in MAKING.items()}
    counts = {name: series(name) for name in ("samples", "tokens")}
    found = {}
    for rank, times in series("step_s").items():
        measured = known["compute"].get(rank) or known["comm"].get(rank) or times
        steps, step_s = _since(times, _begin(times, measured))
        if not len(step_s) or step_s.mean() <= 0:
            continue
        mean_ms = float(step_s.mean()) * 1e3
        shares = {n: _per_s(of[rank], steps, step_s) for n, of in known.items() if rank in of}
        rates = {n: _per_s(of[rank], steps, step_s) for n, of in counts.items() if rank in of}
        works = {n: _per_s(of[rank], steps, step_s) for n, of in made.items() if rank in of}
        found[rank] = RecentSteps(
            mean_ms,
            step_s * 1e3,
            {
                name: mean_ms * min(1.0, share)
                for name, share in shares.items()
                if share is not None
            },
            {name: rate for name, rate in rates.items() if rate is not None},
            {name: mean_ms * work for name, work in works.items() if work is not None},
        )
    return found


def divided(steps: RecentSteps, explained: RankStep | None) -> dict[str, float]:
    """Return what a step is made of by the names of `analysis.values.PARTS`, milliseconds.

    How much computing hid communication, and how much of the exposed was waiting, is known of the
    steps that were compared: these shares stand for the others.

    Args:
        steps: The rank's recent steps; their communication was measured.
        explained: What the comparison found of the rank, where it has any.
    """
    known = explained.parts if explained is not None else {}
    compute_ms, comm_ms = steps.parts.get("compute", 0.0), steps.parts.get("comm", 0.0)
    hidden_ms = compute_ms * _share_of(known, "hidden", "compute")
    waiting_ms = comm_ms * _share_of(known, "waiting", "transfer")
    return {
        "compute": compute_ms - hidden_ms,
        "hidden": hidden_ms,
        "transfer": comm_ms - waiting_ms,
        "waiting": waiting_ms,
        "data": steps.parts.get("data", 0.0),
        "optimizer": steps.parts.get("optimizer", 0.0),
        "other": steps.other_ms,
    }


def percent(parts_ms: Iterable[float], steps_ms: Iterable[float]) -> float | None:
    """Return how much of the ranks' steps a part is, in percent; None where no rank knows."""
    whole = sum(steps_ms)
    return 100 * sum(parts_ms) / whole if whole > 0 else None


def comm_pct(steps: Iterable[RecentSteps]) -> float | None:
    """Return how much of a step is exposed communication, over the ranks that measured it."""
    timed = [rank for rank in steps if "comm" in rank.parts]
    return percent((rank.parts["comm"] for rank in timed), (rank.step_ms for rank in timed))


def data_pct(steps: Iterable[RecentSteps]) -> float | None:
    """Return how much of a step the loop waited for its loader, over the ranks that reported it."""
    known = [rank for rank in steps if "data" in rank.parts]
    return percent((rank.parts["data"] for rank in known), (rank.step_ms for rank in known))


def making_ms(steps: Iterable[RecentSteps]) -> dict[str, float]:
    """Return what making a step's batches took by part, the mean of the ranks that reported it."""
    known = [rank.making for rank in steps if rank.making]
    return {
        part: sum(making.get(part, 0.0) for making in known) / len(known)
        for part in MAKING
        if any(part in making for making in known)
    }


def values_of_run(
    steps: Mapping[int, RecentSteps], explained: Iterable[RankStep] = ()
) -> dict[str, float]:
    """Return a run's numbers by their names in MLflow; what no rank knows is absent.

    Times and shares are means over the ranks; samples and tokens are those of all.
    """
    if not steps:
        return {}
    values = {"step_ms": sum(rank.step_ms for rank in steps.values()) / len(steps)}
    if (share := comm_pct(steps.values())) is not None:
        values["comm_pct"] = share
    if share := data_pct(steps.values()):
        values["data_pct"] = share
    values |= {f"make_{part}_ms": ms for part, ms in making_ms(steps.values()).items()}
    compared = {rank.rank: rank for rank in explained if "waiting" in rank.parts}
    both = [rank for rank in steps if rank in compared and "comm" in steps[rank].parts]
    waiting_ms = [divided(steps[rank], compared[rank])["waiting"] for rank in both]
    if (share := percent(waiting_ms, [steps[rank].step_ms for rank in both])) is not None:
        values["wait_pct"] = share
    for name in ("samples", "tokens"):
        rates = [rank.per_s[name] for rank in steps.values() if name in rank.per_s]
        if rates:
            values[f"{name}_per_s"] = sum(rates)
    return values


def losses(series: GetSeries) -> "Mapping[int, Series]":
    """Return the loss by rank: what `nbdist.log(loss=...)` was given, else what backward saw."""
    return series("log.loss") or series("loss")


def last_values(by_rank: "Mapping[int, Series]") -> tuple[int, dict[int, float]]:
    """Return the last step that has a value on any rank, and the value of each rank that has one.

    The mean of these is a run's *last loss*, and the last of what `nbdist.log` was given: a rank
    that died earlier does not count. 0 and {} where there is none.
    """
    ends = {
        rank: (one.steps[one.n - 1], one.values[one.n - 1])
        for rank, one in by_rank.items()
        if one.n
    }
    last = max((step for step, _ in ends.values()), default=0.0)
    return int(last), {rank: value for rank, (step, value) in ends.items() if step == last}


def _begin(times: "Series", measured: "Series") -> float:
    """Return the first recent step."""
    if not times.n or not measured.n:
        return 0.0
    first = times.steps[min(1, times.n - 1)]
    return max(first, measured.steps[max(0, measured.n - RECENT)])


def _since(series: "Series", step: float) -> tuple[Floats, Floats]:
    """Return the finite values from a step on, and their steps."""
    # Slices: numpy must not hold the arrays themselves, or they could not grow.
    n, first = series.n, bisect_left(series.steps, step, hi=series.n)
    steps, values = np.array(series.steps[first:n]), np.array(series.values[first:n])
    is_finite = np.isfinite(values)
    return steps[is_finite], values[is_finite]


def _per_s(known: "Series", steps: Floats, step_s: Floats) -> float | None:
    """Return the sum of a value over the time of the steps that tell it; None where none does."""
    at, values = _since(known, steps[0])
    place = np.minimum(np.searchsorted(steps, at), len(steps) - 1)
    both = steps[place] == at
    time_s = step_s[place[both]].sum()
    return max(0.0, float(values[both].sum() / time_s)) if time_s > 0 else None


def _share_of(parts: Mapping[str, float], name: str, other: str) -> float:
    """Return a part as a share of the two; 0 where nothing is known of them."""
    whole = parts.get(name, 0.0) + parts.get(other, 0.0)
    return parts.get(name, 0.0) / whole if whole > 0 else 0.0
