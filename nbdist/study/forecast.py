"""Predict the step of a training on more ranks or another link, from few measured worlds. Pure.

The model of a step: work by Amdahl (1967), communication by latency and bandwidth (Hockney, 1994)
from the very collectives of the step, hidden as much as was measured, and waiting for the slowest
of n ranks (`scaling.late_s`). Worlds whose ranks wait for cores are left out: no link decides them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from nbdist.shared.errors import UsageError
from nbdist.shared.text import figure
from nbdist.study.links import Link
from nbdist.study.scaling import (
    Call,
    Kind,
    World,
    disturbed,
    fixed_work_s,
    late_s,
    on_ranks,
    traffic,
)
from nbdist.study.step_time import HIDES_BEHIND, StepTime, split_communication

# How far communication may be off: measured on links of 100 Mbit/s and 1 Gbit/s, gloo's all_reduce
# of 1 to 100 MB took 1 to 20 % longer than latency and bandwidth say (docs/scaling.md).
_OF_COMMUNICATION: Final = 0.2
_OF_SKEW: Final = 0.5  # ranks are late by a normal distribution, which nobody has checked
_LEAST: Final = 0.03  # of the step, whatever was measured


@dataclass(frozen=True, slots=True)
class Forecast:
    """The step on a number of ranks, as predicted.

    Attributes:
        n: Ranks.
        time: Of the step, by its parts.
        error_s: Half the width of the band around it.
        speed_up: As in `scaling.Point`.
        efficiency: As there.
        samples_s: Samples a second; 0 where they are not known.
        link: Between all ranks.
    """

    n: int
    time: StepTime
    error_s: float
    speed_up: float
    efficiency: float
    samples_s: float
    link: Link

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.time.total_s


@dataclass(frozen=True, slots=True)
class StepModel:
    """A training's step, on any number of ranks.

    Attributes:
        kind: Strong or weak.
        base: The smallest world measured.
        last: The largest that the model was made of.
        fixed_s: Work that more ranks do not shorten; all of it under weak scaling.
        overlap: The share of the communication that could be hidden and is.
        link: As it follows from `last`.
        shrinking: Kinds of collectives whose payload is a rank's share.
        error_s: Of a predicted step by the spread of the measured ones, and by what the model
            misses them by.
    """

    kind: Kind
    base: World
    last: World
    fixed_s: float
    overlap: float
    link: Link
    shrinking: tuple[str, ...] = ("all_gather",)
    error_s: float = 0.0

    def predict(self, n: int, link: Link | None = None, backend: str = "") -> Forecast:
        """Return the step on n ranks, over the measured link or another one.

        Args:
            n: Ranks.
            link: Between all of them.
            backend: That sends there; the measured one without it.

        Raises:
            UsageError: n is no number of ranks.
        """
        if n < 1:
            raise UsageError(f"A forecast is for one rank or more, not {n}.")
        over = link or self.link
        time = self._time(n, over, backend or self.last.backend)
        best_s = self.base.step_s * self._share(n)
        samples = self.base.samples * (1 if self.kind == "strong" else n / self.base.n)
        return Forecast(
            n,
            time,
            self._error_s(n, time, is_other=link is not None),
            best_s / time.total_s * n,
            best_s / time.total_s,
            samples / time.total_s,
            over,
        )

    def _share(self, n: int) -> float:
        return self.base.n / n if self.kind == "strong" else 1.0

    def _time(self, n: int, link: Link, backend: str) -> StepTime:
        base, share = self.base, self._share(n)
        work_s = self.fixed_s
        if self.kind == "strong":
            work_s += (base.work_s - self.fixed_s) * share
        compute_s = work_s * base.time.compute_s / base.work_s if base.work_s else 0.0
        calls = on_ranks(self.last.calls, self.last.n, n, self.shrinking)
        seconds = link.time_s(traffic(calls, backend))
        exposed_s, hidden_s = split_communication(
            compute_s, {axis_of(calls): seconds}, self.overlap
        )
        later = late_s(n) / late_s(self.last.n) if self.last.n > 1 else 0.0
        loader_s = base.time.loader_s * share
        return StepTime(
            compute_s,
            exposed_s,
            hidden_s,
            loader_s=loader_s,
            skew_s=self.last.time.skew_s * later,
            serial_s=work_s - compute_s,
        )

    def _error_s(self, n: int, time: StepTime, *, is_other: bool) -> float:
        """Return half the band: what is measured is known better than what lies far from it."""
        known, distance = self.last.time, abs(math.log2(n / self.last.n))
        communication = time.exposed_s + time.hidden_s
        beyond_s = communication - (0.0 if is_other else known.exposed_s + known.hidden_s)
        parts = (
            self.error_s * (1 + distance),
            _OF_COMMUNICATION * abs(beyond_s),
            _OF_SKEW * abs(time.skew_s - known.skew_s),
            _LEAST * time.total_s * (1 + distance),
        )
        return math.hypot(*parts)


def fit(worlds: Sequence[World], kind: Kind) -> StepModel:
    """Return the model of these worlds.

    Args:
        worlds: By their number of ranks, the smallest first; two or more of one and more ranks
            whose ranks do not wait for cores.
        kind: What was measured.

    Raises:
        UsageError: They are too few, or a rank's own work grows with more ranks, of strong scaling.
    """
    fitting = [world for world in worlds if not world.is_crowded]
    crowded = len(worlds) - len(fitting)
    if len(fitting) < 2:
        raise UsageError(
            "No forecast: it takes two numbers of ranks with a core for each.",
            why=f"{crowded} of {len(worlds)} wait for cores" if crowded else "",
        )
    if kind == "strong" and (found := disturbed(fitting)):
        few, many = found
        raise UsageError(
            "No strong forecast: the ranks disturb each other, or something else uses the cores.",
            why=f"a rank's own work took {figure(few.work_s * 1e3)} ms a step on {few.n}, and "
            f"{figure(many.work_s * 1e3)} ms on {many.n}, where it should take less",
        )
    base, last = fitting[0], fitting[-1]
    fixed_s = fixed_work_s(fitting) if kind == "strong" else _mean_work_s(fitting)
    model = StepModel(kind, base, last, fixed_s, _overlap(last), link_of(last), _shrinking(fitting))
    missed = [model.predict(world.n).step_s - world.step_s for world in fitting]
    noise = [world.spread_s / math.sqrt(max(1, world.steps)) for world in fitting]
    return replace(model, error_s=math.hypot(*missed, *noise))


def _mean_work_s(worlds: Sequence[World]) -> float:
    return sum(world.work_s for world in worlds) / len(worlds)


def axis_of(calls: Sequence[Call]) -> str:
    """Return by what kind of collectives a step communicates: gradients alone, or shards."""
    return "fsdp" if any(call.kind == "all_gather" for call in calls) else "dp"


def link_of(world: World) -> Link:
    """Return the link that a world's communication was as fast as.

    What collectives took, hidden or not, is the latency of their rounds, where it is known, and
    else their bytes over the bandwidth.
    """
    sent = traffic(world.calls, world.backend)
    total_s = world.time.exposed_s + world.time.hidden_s
    latency_s = min(world.latency_s, 0.9 * total_s / sent.rounds) if sent.rounds else 0.0
    left_s = total_s - sent.rounds * latency_s
    bandwidth = sent.nbytes / left_s if left_s > 0 and sent.nbytes else math.inf
    return Link(latency_s, bandwidth, "as measured", f"of {world.n} ranks' own steps")


def _overlap(world: World) -> float:
    could_s = HIDES_BEHIND[axis_of(world.calls)] * world.time.compute_s
    could_s = min(could_s, world.time.exposed_s + world.time.hidden_s)
    return min(1.0, world.time.hidden_s / could_s) if could_s > 0 else 0.0


def _shrinking(worlds: Sequence[World]) -> tuple[str, ...]:
    """Return the kinds whose payload shrinks with more ranks; of all_gather, unless seen."""
    first, last = worlds[0], worlds[-1]
    found = []
    for kind in {call.kind for call in last.calls}:
        before, after = _payload(first, kind), _payload(last, kind)
        shrinks = kind == "all_gather" if not before else after < before * (first.n / last.n) ** 0.5
        found += [kind] if shrinks else []
    return tuple(sorted(found))


def _payload(world: World, kind: str) -> float:
    calls = [call for call in world.calls if call.kind == kind and call.ranks == world.n]
    return sum(call.nbytes * call.count for call in calls)
