"""How much faster a training gets with more ranks, and what is lost on the way. Pure.

*Strong* scaling: all ranks together do the same work, so that n times as many ranks take an nth of
the time at best. *Weak*: each does as much as before, and the time stays at best. The efficiency is
that best time over the measured one; what it lacks of 1 is divided by what takes the time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist
from typing import Final, Literal

from nbdist.shared.collectives import rounds, sent_bytes
from nbdist.shared.errors import UsageError
from nbdist.study.estimate import Traffic
from nbdist.study.step_time import StepTime

Kind = Literal["strong", "weak"]

# What efficiency is lost to, in the order in which it is told.
LOSSES: Final = ("communication", "skew", "loader", "serial", "cores")
_MORE: Final = 1.05  # times the work of fewer ranks: less is noise of a serial part
STARVED: Final = 0.1  # of a step without a core: then cores decide, where ranks are more than these


@dataclass(frozen=True, slots=True)
class Call:
    """Alike collectives of a step.

    Attributes:
        kind: As in `nbdist.shared.collectives`.
        nbytes: What one rank puts into one of them.
        ranks: That it joins.
        count: A step, of one rank.
        transfer_s: Of one of them, from when the last rank had come; None where it is not known.
        dtype: Of its numbers, such as "float32"; "" where it is not known.
    """

    kind: str
    nbytes: int
    ranks: int
    count: float
    transfer_s: float | None = None
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class World:
    """What was measured on n ranks: means of ranks and steps, a step.

    Attributes:
        n: Ranks.
        time: The step by its parts; `hidden_s` is within `compute_s`.
        spread_s: The standard deviation of single steps.
        steps: That were measured.
        samples: Of all ranks together; 0 where it is not known.
        calls: What a rank launches.
        starved_s: A rank was ready to run and had no core.
        cores: That these ranks share, for each of their threads; 0 where they share none.
        own_s: Each rank's work, in which it waits for nobody.
        backend: gloo or nccl.
        latency_s: Of a message without content; 0 where it is not known.
    """

    n: int
    time: StepTime
    spread_s: float = 0.0
    steps: int = 1
    samples: float = 0.0
    calls: tuple[Call, ...] = ()
    starved_s: float = 0.0
    cores: int = 0
    own_s: tuple[float, ...] = ()
    backend: str = "gloo"
    latency_s: float = 0.0

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.time.total_s

    @property
    def work_s(self) -> float:
        """What a rank computes, and what the Python around it takes."""
        return self.time.compute_s + self.time.serial_s

    @property
    def is_crowded(self) -> bool:
        """Whether ranks are more than cores, and wait for these: then no link decides."""
        return 0 < self.cores < self.n and self.starved_s > STARVED * self.step_s


@dataclass(frozen=True, slots=True)
class Point:
    """One number of ranks.

    Attributes:
        n: Ranks.
        step_s: Of a step.
        samples_s: Samples a second of all ranks; 0 where it is not known.
        speed_up: Against one rank, as if the smallest number measured scaled without a loss.
        efficiency: Of the best, 1.
        lost: Shares by the names of `LOSSES`, which sum to 1 - efficiency. Negative is a gain.
    """

    n: int
    step_s: float
    samples_s: float
    speed_up: float
    efficiency: float
    lost: Mapping[str, float]


def traffic(calls: Sequence[Call], backend: str) -> Traffic:
    """Return what a rank sends for these in a step.

    Raises:
        UsageError: What is sent for one of them is not known.
    """
    sent = Traffic()
    for call in calls:
        sent.nbytes += call.count * sent_bytes(call.kind, call.nbytes, call.ranks, backend)
        sent.rounds += round(call.count * rounds(call.kind, call.ranks, backend))
        sent.count += round(call.count)
        sent.payload += round(call.count * call.nbytes)
        sent.ranks = max(sent.ranks, call.ranks)
    return sent


def kind_of(worlds: Sequence[World]) -> Kind | None:
    """Return which of the two was measured, by the samples of a step; None: they are not known."""
    first, last = worlds[0], worlds[-1]
    if not (first.samples and last.samples) or first.n == last.n:
        return None
    grown = last.samples / first.samples
    return "weak" if grown > (last.n / first.n) ** 0.5 else "strong"


def late_s(n: int) -> float:
    """Return by how many standard deviations the last of n ranks is late, in the mean.

    Source: Blom, Statistical Estimates and Transformed Beta-Variables, 1958: the largest of n
    normal values; within 2 % for n up to 1,000.
    """
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0


def points(worlds: Sequence[World], kind: Kind) -> tuple[Point, ...]:
    """Return speed-up, efficiency and losses of each world.

    Args:
        worlds: By their number of ranks; the first is what the others are compared with.
        kind: What was measured.

    Raises:
        UsageError: There is none, or a step that takes no time.
    """
    if not worlds or any(world.step_s <= 0 for world in worlds):
        raise UsageError("Scaling is told from steps that took time, and there are none.")
    base = worlds[0]
    fitting = [world for world in worlds if not world.is_crowded]
    found = []
    for at, world in enumerate(worlds):
        least_s = min(one.work_s for one in worlds[: at + 1])
        # More ranks shorten a rank's work, or leave it: what it gained is no serial part.
        more_s = world.work_s - least_s if kind == "strong" else 0.0
        found.append(_point(world, base, kind, fitting, more_s))
    return tuple(found)


def _point(world: World, base: World, kind: Kind, fitting: Sequence[World], more_s: float) -> Point:
    share = base.n / world.n if kind == "strong" else 1.0
    best_s = base.step_s * share
    lost_s = _lost_s(world, base, share, more_s)
    if world.is_crowded:
        lost_s = _without_cores(lost_s, world, base, kind, fitting)
    faster = best_s / world.step_s
    return Point(
        world.n,
        world.step_s,
        world.samples / world.step_s,
        faster * world.n,
        faster,
        {name: lost_s[name] / world.step_s for name in LOSSES},
    )


def _lost_s(world: World, base: World, share: float, more_s: float) -> dict[str, float]:
    """Return by what the step is longer than its best, in seconds; the parts sum to all of it."""
    mine, before = world.time, base.time
    return {
        "communication": mine.exposed_s
        + mine.bubble_s
        - (before.exposed_s + before.bubble_s) * share,
        "skew": mine.skew_s - before.skew_s * share,
        "loader": mine.loader_s - before.loader_s * share,
        "serial": world.work_s - more_s - base.work_s * share,
        "cores": more_s,
    }


def _without_cores(
    lost_s: Mapping[str, float], world: World, base: World, kind: Kind, fitting: Sequence[World]
) -> dict[str, float]:
    """Return losses of ranks that share cores: what those with a core each do not explain.

    Ranks that wait for a core compute longer, come late, and send late: to its own cause each is
    counted as much of it as the largest world with cores for all leads to expect.
    """
    known = [one for one in fitting if one.n < world.n]
    if not known:
        return dict(lost_s)
    near = known[-1]
    kept = dict(lost_s)
    if near.n > 1:
        sent = traffic(near.calls, near.backend).nbytes
        more = (
            traffic(on_ranks(near.calls, near.n, world.n), near.backend).nbytes / sent
            if sent
            else 1
        )
        later = late_s(world.n) / late_s(near.n)
        kept["communication"] = min(lost_s["communication"], near.time.exposed_s * more)
        kept["skew"] = min(lost_s["skew"], near.time.skew_s * later)
    fixed_s = fixed_work_s(known) if kind == "strong" else 0.0
    kept["serial"] = min(lost_s["serial"], fixed_s * (1 - base.n / world.n))
    kept["cores"] += sum(lost_s[name] - kept[name] for name in LOSSES)
    return kept


def fixed_work_s(worlds: Sequence[World]) -> float:
    """Return the work that more ranks do not shorten, of strong scaling: Amdahl's serial part."""
    first, last = worlds[0], worlds[-1]
    if first.n == last.n:
        return 0.0
    fixed = (last.n * last.work_s - first.n * first.work_s) / (last.n - first.n)
    return min(max(0.0, fixed), first.work_s)


def disturbed(worlds: Sequence[World]) -> tuple[World, World] | None:
    """Return two worlds of strong scaling of which a rank of the larger one works longer, if any.

    All ranks together do the same work: then they disturb each other, or something else does.
    """
    pairs = pairwise(worlds)
    return next(((few, many) for few, many in pairs if many.work_s > _MORE * few.work_s), None)


def on_ranks(
    calls: Sequence[Call], now: int, then: int, shrinking: Sequence[str] = ("all_gather",)
) -> tuple[Call, ...]:
    """Return the collectives of a step on `now` ranks as they are on `then`.

    Args:
        calls: Those that join all ranks join all there, too; the others stay.
        now: Ranks.
        then: Ranks.
        shrinking: Kinds whose payload is a rank's share: half of it on twice the ranks.
    """
    return tuple(
        replace(
            call,
            nbytes=round(call.nbytes * now / then) if call.kind in shrinking else call.nbytes,
            ranks=then,
        )
        if call.ranks == now
        else call
        for call in calls
    )
