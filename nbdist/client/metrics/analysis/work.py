"""Say which rank is slow by its own work, and at what. Pure.

A rank's *own work* is its step without exposed communication. It is compared with the median of its
peers' in the same steps, so that what slows all ranks down cancels; and in each of `BLOCKS` parts
of the window, so that a pause, one checkpoint or a burst of a dozen steps is no straggler. Medians
find what slows most steps, and means what comes back every few, such as an evaluation. What is told
are means: they sum to the step, and are what the board shows.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from nbdist.client.metrics.analysis.values import Cause
from nbdist.shared.wire import Record, is_measured

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]

FEWEST_STEPS = 50
SHORTEST_S = 1.0  # steps of a millisecond: 50 of them are too short to tell noise from load
MOST_STEPS = 1000
FIRST_STEPS = 2  # of a cell: connections are opened, buckets built, code is compiled
BLOCKS = 5
SLOWER = 0.2  # than the peers, in the window's median or each block's mean
IN_EACH_BLOCK = 0.1
OF_STEP = 0.1  # where most of a step is communication, no rank waits for a little more work
MOST_OF = 0.5  # of what a rank is slower: then that is the cause
LEAST_OF = 0.25  # of it, else what takes longer is now this and now that: the machine, by chance
STARVED_S = 5.0  # the kernel needs some seconds to spread over the cores what runs on them
STANDS_OUT = 3.0  # who is starved so many times as long as any other; else the machine is full
BIGGER_BATCH = 1.15
ALIKE = 3.0  # the most of a block's lateness against the least: 1 or 2 evaluations, and noise
UNEVEN = 1 / 3  # of the mean, between it and the median: then some steps are much slower

_KEPT = MOST_STEPS + 1000  # steps; ranks' records come in batches, one rank's before another's
_PARTS: tuple[Cause, ...] = ("data", "forward", "backward", "optimizer", "other")
_LUMPS = ("cpu", "starved", "idle")  # not had in every step: the kernel gives a core for some ms
_COUNTS = ("samples", "tokens", "expert_tokens", "expert_load")
_COLUMNS = ("own", "step", "comm", *_PARTS, *_LUMPS, *_COUNTS)
_TOLD = ("own", *_PARTS, *_LUMPS, *_COUNTS)
_UNIT = dict.fromkeys(_COUNTS, 1.0)  # others are milliseconds of seconds
_AT = {name: i for i, name in enumerate(_COLUMNS)}


@dataclass(frozen=True, slots=True)
class Slow:
    """A rank whose own work is slow: the cause, by how much, and the numbers.

    Means, in milliseconds a step; `parts` as (it, its peers' median), of which `cpu`, `starved` and
    `idle` are known of the whole step alone. `share` is how much longer its own work takes than the
    peers'; `on_average`: that is so by some steps more than by others.
    """

    rank: int
    cause: Cause
    share: float
    step_ms: float
    parts: Mapping[str, tuple[float, float]]
    late_ms: float
    since_step: int
    on_average: bool = False

    @property
    def may_pass(self) -> bool:
        """Whether it may be the machine's chance, which spreads too few cores for some moments."""
        return self.cause == "starved" or self.late_ms <= self.parts["starved"][1]

    def within(self, name: str) -> float:
        """Return how much longer `cpu`, `starved` or `idle` is within the part that is the cause.

        That is what is left when the other parts that are longer have had all they can of it.
        """
        mine, theirs = zip(self.parts[self.cause], self.parts[name], strict=True)
        part_ms, more_ms = (own - of_peers for own, of_peers in zip(mine, theirs, strict=True))
        return min(max(more_ms - max(self.late_ms - part_ms, 0.0), 0.0), part_ms)


class StepRows:
    """The newest measured steps of all ranks, in arrays of one size."""

    def __init__(self) -> None:
        self._rows: dict[int, Floats] = {}
        self._steps: dict[int, Steps] = {}
        self._counts: dict[int, int] = {}

    def add(self, record: Record) -> None:
        """Take in a rank's step."""
        if record.step <= FIRST_STEPS or not is_measured(record.values):
            return
        rank = record.rank
        if rank not in self._rows:
            self._rows[rank] = np.full((_KEPT, len(_COLUMNS)), np.nan)
            self._steps[rank] = np.zeros(_KEPT, dtype=np.int64)
        at = self._counts.get(rank, 0) % _KEPT
        self._rows[rank][at] = _row(record.values)
        self._steps[rank][at] = record.step
        self._counts[rank] = self._counts.get(rank, 0) + 1

    def window(self, at_least_s: float = SHORTEST_S) -> "StepWindow | None":
        """Return the newest steps that all ranks have reported; None while these are too few."""
        ranks = self._ranks()
        if not ranks:
            return None
        common = reduce(np.intersect1d, [self._steps[rank] for rank in ranks])
        common = common[common > 0]
        window = self._last(ranks, common, FEWEST_STEPS)
        step_s = 0.0 if window is None else window.step_s()
        if window is None or step_s <= 0:
            return None
        # Where not all steps are measured, those that are stand for a longer time.
        a_second = FEWEST_STEPS / (step_s * (window.steps[-1] - window.steps[0] + 1))
        wanted = min(MOST_STEPS, int(at_least_s * a_second) + 1)
        return window if wanted <= FEWEST_STEPS else self._last(ranks, common, wanted)

    def _ranks(self) -> list[int]:
        """Return the ranks that go on: one that makes no more steps is not waited for."""
        newest = {rank: int(steps.max()) for rank, steps in self._steps.items()}
        if not newest:
            return []
        ahead = self._steps[max(newest, key=newest.__getitem__)]
        behind = {rank: int((ahead > step).sum()) for rank, step in newest.items()}
        return sorted(rank for rank, steps in behind.items() if steps < _KEPT - MOST_STEPS)

    def _last(self, ranks: list[int], common: Steps, count: int) -> "StepWindow | None":
        if len(common) < count:
            return None
        steps = common[-count:]
        return StepWindow(tuple(ranks), steps, np.stack([self._of(rank, steps) for rank in ranks]))

    def _of(self, rank: int, steps: Steps) -> Floats:
        known = self._steps[rank]
        order = np.argsort(known, kind="stable")
        return self._rows[rank][order[np.searchsorted(known[order], steps, "right") - 1]]


@dataclass(frozen=True, slots=True, eq=False)
class StepWindow:
    """The same steps of several ranks: `values` by (rank, step, column), in seconds."""

    ranks: tuple[int, ...]
    steps: Steps
    values: Floats

    def column(self, name: str) -> Floats:
        """Return one column by (rank, step)."""
        return self.values[:, :, _AT[name]]

    def median_s(self, name: str) -> float:
        """Return the median over all ranks and steps; 0 where no rank reports it."""
        known = self.column(name)
        known = known[np.isfinite(known)]
        return float(np.median(known)) if len(known) else 0.0

    def step_s(self) -> float:
        """Return the mean of a step, without each rank's longest: that may be a pause."""
        steps = np.nan_to_num(self.column("step"))
        count = np.maximum((steps > 0).sum(axis=1) - 1, 1)
        return float(np.median((steps.sum(axis=1) - steps.max(axis=1)) / count))

    def own_ms(self) -> dict[int, float]:
        """Return the mean own work of a step, by rank; of those that tell it."""
        means = zip(self.ranks, _means(self.column("own")).tolist(), strict=True)
        return {rank: 1e3 * mean for rank, mean in means if mean == mean}

    def typical_s(self, name: str, rank: int) -> float:
        """Return the median over a rank's steps; 0 where it does not tell."""
        known = self.column(name)[self.ranks.index(rank)] if rank in self.ranks else np.zeros(0)
        known = known[np.isfinite(known)]
        return float(np.median(known)) if len(known) else 0.0

    def mean_s(self, name: str, rank: int) -> float:
        """Return the mean over a rank's steps; 0 where it does not tell."""
        known = self.column(name)[self.ranks.index(rank)] if rank in self.ranks else np.zeros(0)
        known = known[np.isfinite(known)]
        return float(np.mean(known)) if len(known) else 0.0


def find(window: StepWindow, peers: Mapping[int, Collection[int]]) -> list[Slow]:
    """Return the ranks whose own work is slow, each against its `peers`."""
    own = window.column("own")
    if np.isnan(own).mean() > 0.2:
        return []
    blocks = np.stack([_means(b) for b in np.array_split(own, BLOCKS, axis=1)], axis=1)
    causes: dict[int, tuple[Cause, list[int]]] = {}
    for at, rank in enumerate(window.ranks):
        others = sorted(set(peers.get(rank, ())) & set(window.ranks) - {rank})
        of_others = [window.ranks.index(other) for other in others]
        if not others:
            continue
        if _is_steadily_slow(own[at], own[of_others]):
            cause = _cause(window, at, of_others, steadily=True)
        elif _is_slow_on_average(blocks[at], blocks[of_others]):
            cause = _cause(window, at, of_others, steadily=False)
            cause = None if cause == "starved" else cause  # now and then anyone lacks a core
        else:
            continue
        if cause is not None and (cause != "starved" or _stands_out(window, rank, others)):
            causes[rank] = cause, others
    found = (_told(window, rank, causes) for rank in causes)
    return [slow for slow in found if slow.share >= IN_EACH_BLOCK]


def _is_steadily_slow(mine: Floats, theirs: Floats) -> bool:
    """Return whether most steps are slow, by (step) and (peer, step)."""
    # Cheap, and nearly always the end of it.
    if not np.nanmedian(mine) > (1 + SLOWER / 2) * np.nanmedian(theirs):
        return False
    base = np.nanmedian(theirs, axis=0)
    late = mine - base
    if not np.nanmedian(late) >= SLOWER * np.nanmedian(base):
        return False
    pairs = zip(np.array_split(late, BLOCKS), np.array_split(base, BLOCKS), strict=True)
    return all(np.nanmedian(lates) >= IN_EACH_BLOCK * np.nanmedian(of) for lates, of in pairs)


def _is_slow_on_average(mine: Floats, theirs: Floats) -> bool:
    """Return whether the mean of each block is, by (block) and (peer, block): a periodic cause.

    Means also rise by chance, now much and now little. So the least of a rank's must be above the
    most of a typical peer's, and its lateness about the same in all blocks.
    """
    late = mine - np.median(theirs, axis=0)
    is_above = mine.min() >= (1 + SLOWER) * np.median(theirs.max(axis=1))
    return bool(is_above and late.max() <= ALIKE * late.min())


def _cause(window: StepWindow, at: int, of_others: list[int], *, steadily: bool) -> Cause | None:
    """Return why a rank is slow, None where that matters little or is no one thing."""
    if steadily:
        own = window.column("own")
        late_ms = float(np.nanmedian(own[at] - np.nanmedian(own[of_others], axis=0))) * 1e3
        step_ms = float(np.nanmedian(window.column("step")[at])) * 1e3
        parts = {n: (_typical(window, n, [at]), _typical(window, n, of_others)) for n in _TOLD}
    else:
        parts = _means_of(window, at, of_others)
        late_ms = parts["own"][0] - parts["own"][1]
        step_ms = _mean_ms(window, "step", at)
    return cause_of(parts, late_ms) if late_ms >= OF_STEP * step_ms else None


def _told(window: StepWindow, rank: int, causes: Mapping[int, tuple[Cause, list[int]]]) -> Slow:
    """Return the numbers of a slow rank: means, beside those of the peers that are not slow."""
    cause, others = causes[rank]
    at = window.ranks.index(rank)
    of_others = [window.ranks.index(o) for o in others if o not in causes]
    of_others = of_others or [window.ranks.index(o) for o in others]
    parts = _means_of(window, at, of_others)
    mine_ms, theirs_ms = parts["own"]
    late_ms = mine_ms - theirs_ms
    own = window.column("own")
    typical_ms = float(np.nanmedian(own[at] - np.nanmedian(own[of_others], axis=0))) * 1e3
    return Slow(
        rank,
        cause,
        late_ms / theirs_ms,
        window.mean_s("step", rank) * 1e3,
        parts,
        late_ms,
        int(window.steps[0]),
        on_average=abs(late_ms - typical_ms) > UNEVEN * late_ms,
    )


def _stands_out(window: StepWindow, rank: int, others: list[int]) -> bool:
    """Return whether a rank lacks a core much more than any other."""
    most_s = max(window.mean_s("starved", other) for other in others)
    return window.mean_s("starved", rank) >= STANDS_OUT * most_s


def _typical(window: StepWindow, name: str, at: list[int]) -> float:
    values = window.column(name)[at]
    known = values[np.isfinite(values)]
    if not len(known):
        return float("nan")
    middle = np.median if name in ("own", *_PARTS) else np.mean
    return float(middle(known)) * _UNIT.get(name, 1e3)


def _means_of(window: StepWindow, at: int, of_others: list[int]) -> dict[str, tuple[float, float]]:
    """Return a rank's means, and the median of its peers'."""
    return {
        name: (_mean_ms(window, name, at), _of_peers(window, name, of_others)) for name in _TOLD
    }


def _mean_ms(window: StepWindow, name: str, at: int) -> float:
    return float(_means(window.column(name)[[at]])[0]) * _UNIT.get(name, 1e3)


def _of_peers(window: StepWindow, name: str, of_others: list[int]) -> float:
    means = _means(window.column(name)[of_others])
    known = means[np.isfinite(means)]
    return float(np.median(known)) * _UNIT.get(name, 1e3) if len(known) else float("nan")


def _means(values: Floats) -> Floats:
    """Return the mean over steps, NaN where no step tells."""
    is_known = np.isfinite(values)
    count = is_known.sum(axis=1)
    total = np.where(is_known, values, 0.0).sum(axis=1)
    means: Floats = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return means


def cause_of(parts: Mapping[str, tuple[float, float]], late_ms: float) -> Cause | None:
    """Return why a rank is `late_ms` slower a step, None when it is no one thing.

    `parts` as in `Slow`.
    """

    def more(name: str) -> float:
        mine, theirs = parts[name]
        return mine - theirs if mine == mine and theirs == theirs else 0.0

    if bigger_batch(parts) is not None:
        return "batch"
    # Who computes more also waits more often for a core, where cores are scarce.
    computes_more = more("cpu") >= max(SLOWER * parts["own"][1], LEAST_OF * late_ms)
    # So much it would wait that has to wait as often as the others for what it computes.
    mine, theirs = parts["cpu"]
    expected = parts["starved"][1] * max(0.0, mine / theirs - 1) if theirs > 0 else 0.0
    if more("starved") - expected >= MOST_OF * late_ms and not computes_more:
        return "starved"
    most: Cause = "other"
    for part in _PARTS:
        if more(part) > more(most):
            most = part
    if more("idle") >= MOST_OF * late_ms > more(most):
        return "idle"
    if more(most) < LEAST_OF * late_ms:
        return None
    return "experts" if _has_busier_experts(parts, late_ms, most, more("idle")) else most


def _has_busier_experts(
    parts: Mapping[str, tuple[float, float]], late_ms: float, most: Cause, more_idle_ms: float
) -> bool:
    """Return whether a rank computes longer for the tokens that its experts get.

    They must be so many more that they can explain most of what it is late by, were experts all
    that a rank computes.
    """
    mine, theirs = parts["expert_load"]
    if most not in ("forward", "backward") or not (mine > 0 and mine >= BIGGER_BATCH * theirs):
        return False
    explained_ms = (mine / theirs - 1) * parts["own"][1] if theirs else late_ms
    return explained_ms >= MOST_OF * late_ms > more_idle_ms


def bigger_batch(parts: Mapping[str, tuple[float, float]]) -> str | None:
    """Return of what the rank gets more a step, None when it does not."""
    for name in ("samples", "tokens"):
        mine, theirs = parts[name]
        if mine >= BIGGER_BATCH * theirs > 0:
            return name
    return None


def _load_of(values: Mapping[str, float]) -> float:
    """Return how many times an even share of the tokens a rank's experts had; NaN without any."""
    even = values.get("expert_even", 0.0)
    return values["expert_tokens"] / even if even else float("nan")


def _row(values: Mapping[str, float]) -> list[float]:
    nan = float("nan")
    step, comm = values["step_s"], values.get("comm_s", 0.0)
    own = max(0.0, step - comm)
    compute = values.get("compute_s", nan)
    forward = values.get("forward_s", nan) - values.get("forward_comm_s", 0.0)
    if forward > compute:  # they were measured apart
        forward = compute
    starved, cpu = values.get("starved_s", nan), values.get("cpu_s", nan)
    row = {
        "own": own,
        "step": step,
        "comm": comm,
        "data": values.get("data_s", nan),
        "forward": forward,
        "backward": max(0.0, compute - forward) if forward == forward else compute,
        "optimizer": values.get("optimizer_s", nan),
        "other": values.get("other_s", nan),
        "cpu": cpu,
        "starved": starved,
        "idle": own - cpu - (starved if starved == starved else 0.0),
        "samples": values.get("samples", nan),
        "tokens": values.get("tokens", nan),
        "expert_tokens": values.get("expert_tokens", nan),
        "expert_load": _load_of(values),
    }
    return [row[name] for name in _COLUMNS]
