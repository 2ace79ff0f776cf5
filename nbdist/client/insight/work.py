"""Say which rank is slow by its own work, and at what. Pure.

A rank's *own work* is its step without exposed communication. It is compared with the median of its
peers' in the same steps, so that what slows all ranks down cancels; and in each of `BLOCKS` parts
of the window by medians, so that a pause, a checkpoint or a burst of a dozen steps is no straggler.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nbdist.client.insight.values import Cause
from nbdist.wire import Record

Floats = NDArray[np.float64]

FEWEST_STEPS = 50
SHORTEST_S = 1.0  # steps of a millisecond: 50 of them are too short to tell noise from load
MOST_STEPS = 1000
FIRST_STEPS = 2  # of a cell: connections are opened, buckets built, code is compiled
BLOCKS = 5
SLOWER = 0.2  # than the peers, in the window's median
IN_EACH_BLOCK = 0.1
OF_STEP = 0.1  # where most of a step is communication, a little more work is waited for by nobody
MOST_OF = 0.5  # of what a rank is slower: then that is the cause
LEAST_OF = 0.25  # of it, else what takes longer is now this and now that: the machine, by chance
STARVED_S = 5.0  # the kernel needs some seconds to spread over the cores what runs on them
STANDS_OUT = 3.0  # who is starved so many times as long as any other; else the machine is full
BIGGER_BATCH = 1.15

_KEPT = MOST_STEPS + 1000  # steps; ranks' records come in batches, one rank's before another's
_PARTS: tuple[Cause, ...] = ("data", "forward", "backward", "optimizer", "other")
_LUMPS = ("cpu", "starved", "idle")  # not had in every step: the kernel gives a core for some ms
_COLUMNS = ("own", "step", "comm", *_PARTS, *_LUMPS, "samples", "tokens")
_AT = {name: i for i, name in enumerate(_COLUMNS)}


@dataclass(frozen=True, slots=True)
class Slow:
    """A rank whose own work is slow: the cause, by how much, and the numbers, as (it, its peers).

    Milliseconds a step; `parts` holds medians, but means of `cpu`, `starved` and `idle`, which are
    parts of `step_ms`, a mean too.
    """

    rank: int
    cause: Cause
    share: float
    step_ms: float
    parts: Mapping[str, tuple[float, float]]
    late_ms: float
    since_step: int


class Rows:
    """The newest steps of all ranks, in arrays of one size."""

    def __init__(self) -> None:
        self._rows: dict[int, Floats] = {}
        self._steps: dict[int, NDArray[np.int64]] = {}

    def add(self, record: Record) -> None:
        """Take in a rank's step."""
        if record.step <= FIRST_STEPS or "step_s" not in record.values:
            return
        if record.rank not in self._rows:
            self._rows[record.rank] = np.full((_KEPT, len(_COLUMNS)), np.nan)
            self._steps[record.rank] = np.zeros(_KEPT, dtype=np.int64)
        at = record.step % _KEPT
        self._rows[record.rank][at] = _row(record.values)
        self._steps[record.rank][at] = record.step

    def window(self, at_least_s: float = SHORTEST_S) -> "Window | None":
        """Return the newest steps that all ranks have told; None while these are too few."""
        newest = {rank: int(steps.max()) for rank, steps in self._steps.items()}
        first = max(newest.values(), default=0) - (_KEPT - MOST_STEPS)
        # A rank that makes no more steps is not waited for.
        ranks = sorted(rank for rank, step in newest.items() if step > first)
        if not ranks:
            return None
        last = min(newest[rank] for rank in ranks)
        window = self._last(ranks, last, FEWEST_STEPS)
        step_s = 0.0 if window is None else window.median_s("step")
        if step_s <= 0:
            return None
        wanted = min(MOST_STEPS, int(at_least_s / step_s) + 1)
        return window if wanted <= FEWEST_STEPS else self._last(ranks, last, wanted)

    def _last(self, ranks: list[int], last: int, count: int) -> "Window | None":
        first = last - count + 1
        if first <= FIRST_STEPS:
            return None
        steps = np.arange(first, last + 1)
        return Window(tuple(ranks), steps, np.stack([self._of(rank, steps) for rank in ranks]))

    def _of(self, rank: int, steps: "NDArray[np.int64]") -> Floats:
        at = steps % _KEPT
        is_there = self._steps[rank][at] == steps
        return np.where(is_there[:, None], self._rows[rank][at], np.nan)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The same steps of several ranks: `values` by (rank, step, column), in seconds."""

    ranks: tuple[int, ...]
    steps: NDArray[np.int64]
    values: Floats

    def column(self, name: str) -> Floats:
        """Return one column by (rank, step)."""
        return self.values[:, :, _AT[name]]

    def median_s(self, name: str) -> float:
        """Return the median over all ranks and steps; 0 where nobody tells it."""
        known = self.column(name)
        known = known[np.isfinite(known)]
        return float(np.median(known)) if len(known) else 0.0

    def mean_s(self, name: str, rank: int) -> float:
        """Return the mean over a rank's steps; 0 where it does not tell."""
        known = self.column(name)[self.ranks.index(rank)] if rank in self.ranks else np.zeros(0)
        known = known[np.isfinite(known)]
        return float(np.mean(known)) if len(known) else 0.0


def find(window: Window, peers: Mapping[int, Collection[int]]) -> list[Slow]:
    """Return the ranks whose own work is slow, each against its `peers`."""
    own = window.column("own")
    if np.isnan(own).mean() > 0.2:
        return []
    typical = {
        rank: float(np.nanmedian(row)) if np.isfinite(row).any() else np.nan
        for rank, row in zip(window.ranks, own, strict=True)
    }
    found = []
    for rank in window.ranks:
        others = sorted(set(peers.get(rank, ())) & set(window.ranks) - {rank})
        if not others:
            continue
        # Cheap, and nearly always the end of it.
        if not typical[rank] > (1 + SLOWER / 2) * np.nanmedian([typical[o] for o in others]):
            continue
        slow = _judge(window, rank, others)
        if slow is not None:
            found.append(slow)
    return found


def _judge(window: Window, rank: int, others: list[int]) -> Slow | None:
    at = window.ranks.index(rank)
    of_others = [window.ranks.index(other) for other in others]
    own = window.column("own")
    theirs = np.nanmedian(own[of_others], axis=0)
    late = own[at] - theirs
    share = float(np.nanmedian(late) / np.nanmedian(theirs))
    step = float(np.nanmedian(window.column("step")[at]))
    if share < SLOWER or np.nanmedian(late) < OF_STEP * step:
        return None
    for block, base in zip(
        np.array_split(late, BLOCKS), np.array_split(theirs, BLOCKS), strict=True
    ):
        if not np.nanmedian(block) >= IN_EACH_BLOCK * np.nanmedian(base):
            return None
    parts = {
        name: (_typical(window, name, [at]), _typical(window, name, of_others))
        for name in ("own", *_PARTS, *_LUMPS, "samples", "tokens")
    }
    late_ms = float(np.nanmedian(late)) * 1e3
    cause = cause_of(parts, late_ms)
    if cause is None or (cause == "starved" and not _stands_out(window, rank, others)):
        return None
    return Slow(
        rank,
        cause,
        share,
        float(np.nanmean(window.column("step")[at])) * 1e3,
        parts,
        late_ms,
        int(window.steps[0]),
    )


def _stands_out(window: Window, rank: int, others: list[int]) -> bool:
    """Return whether a rank lacks a core much more than any other."""
    most_s = max(window.mean_s("starved", other) for other in others)
    return window.mean_s("starved", rank) >= STANDS_OUT * most_s


def _typical(window: Window, name: str, at: list[int]) -> float:
    values = window.column(name)[at]
    known = values[np.isfinite(values)]
    if not len(known):
        return float("nan")
    if name in ("samples", "tokens"):
        return float(np.mean(known))
    middle = np.mean if name in _LUMPS else np.median
    return float(middle(known)) * 1e3


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
    if more("starved") >= MOST_OF * late_ms and not computes_more:
        return "starved"
    most: Cause = "other"
    for part in _PARTS:
        if more(part) > more(most):
            most = part
    if more("idle") >= MOST_OF * late_ms > more(most):
        return "idle"
    return most if more(most) >= LEAST_OF * late_ms else None


def bigger_batch(parts: Mapping[str, tuple[float, float]]) -> str | None:
    """Return of what the rank gets more a step, None when it does not."""
    for name in ("samples", "tokens"):
        mine, theirs = parts[name]
        if mine >= BIGGER_BATCH * theirs > 0:
            return name
    return None


def _row(values: Mapping[str, float]) -> list[float]:
    nan = float("nan")
    step, comm = values["step_s"], values.get("comm_s", 0.0)
    own = max(0.0, step - comm)
    compute = values.get("compute_s", nan)
    forward = values.get("forward_s", nan) - values.get("forward_comm_s", 0.0)
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
    }
    return [row[name] for name in _COLUMNS]
