"""A rule on ranks that wait for their loader: which number to raise, or what else to change.

`advice` decides on one rank's mean step.

More workers help as far as there are cores for them. What a step must take at least is what it
takes without waiting for data, and what its processor time, workers' included, takes on the cores
that the rank has: of making a batch, what waits (for a disk, a network) needs no core.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from nbdist.client.metrics.analysis.values import RECENT
from nbdist.client.metrics.checks.planting import both, training
from nbdist.client.metrics.checks.rule import Rule, WatchedCell, Watcher
from nbdist.client.metrics.recent import MAKING
from nbdist.shared.text import name_ranks
from nbdist.shared.wire import Record

SHOWN_S = 5e-5  # from which on a part is told
STARVED = 0.2  # of a step, from which on the loader is named
FEWEST = 10  # measured steps, from which a mean is one
ENOUGH_AT_END = 20  # steps of a cell that is over
MOST_OF = 0.5
HELPS = 0.9  # what is not below this share of a step is no gain
MOST_WORKERS = 32


@dataclass(frozen=True, slots=True)
class LoaderFacts:
    """What a rank tells of a loader: see `wire.Record`."""

    prompt: int = 0
    line: int = 0
    workers: int = 0
    pinned: bool = False
    persistent: bool = False
    cores: float = 1.0

    @property
    def name(self) -> str:
        """As errors name a line."""
        where = f"In[{self.prompt}], " if self.prompt else ""
        return f"the loader of {where}line {self.line}" if self.line else "the loader"


@dataclass(frozen=True, slots=True)
class MeanStep:
    """A rank's mean step, in seconds.

    Attributes:
        step_s: From end to end.
        data_s: The loop waited for its loader.
        making: What the step's batches took to make, by the names of `recent.MAKING`.
        making_cpu_s: Processor time of that.
        cpu_s: Processor time of the main thread.
        starved_s: It was ready to run and had no core.
        batches: How many.
        is_seldom: Most of `data_s` is that of few steps.
    """

    step_s: float
    data_s: float
    making: Mapping[str, float]
    making_cpu_s: float = 0.0
    cpu_s: float = 0.0
    starved_s: float = 0.0
    batches: float = 1.0
    is_seldom: bool = False

    @property
    def rest_s(self) -> float:
        """What is left of it without waiting for data."""
        return max(0.0, self.step_s - self.data_s)

    @property
    def read_s(self) -> float:
        """What was read ahead in the rank: no number of workers changes it."""
        return self.making.get("read", 0.0) + self.making.get("decode", 0.0)

    @property
    def made_s(self) -> float:
        """What its batches took to make, but for their way to the loop."""
        return sum(s for part, s in self.making.items() if part != "copy")


def advice(step: MeanStep, loader: LoaderFacts) -> str:
    """Return what to do about a step that waits for its loader: "num_workers=6 instead of 2"."""
    what = (
        "a batch takes" if step.batches < 1.5 else f"the {step.batches:.0f} batches of a step take"
    )
    numbers = f"{what} {_s(step.made_s)} to make, a step {_s(step.rest_s)}"
    if step.is_seldom and loader.workers and not loader.persistent:
        return "persistent_workers=True: most of it is when an epoch begins and workers start."
    if step.read_s >= MOST_OF * step.made_s > MOST_OF * SHOWN_S:
        return f"{_most_of(step.making)} ({numbers})."
    main_s = step.cpu_s - (0.0 if loader.workers else min(step.cpu_s, step.making_cpu_s))
    least_s = max(step.rest_s, (main_s + step.making_cpu_s) / max(loader.cores, 0.1), 1e-6)
    most = f"; {_most_of(step.making)}" if step.made_s > SHOWN_S else ""
    wanted = min(MOST_WORKERS, max(1, math.ceil((step.made_s - step.read_s) / least_s - 0.05)))
    if wanted <= loader.workers and step.making.get("copy", 0.0) >= MOST_OF * step.data_s:
        pinned = "" if loader.pinned else "pin_memory=True where there is a GPU, or "
        return (
            f"{pinned}smaller dtypes: {_s(step.making['copy'])} of it copies batches ({numbers})."
        )
    computes = step.making_cpu_s >= MOST_OF * step.made_s
    is_full = computes and step.starved_s >= STARVED * step.step_s
    gains = max(least_s, step.made_s / wanted) < HELPS * step.step_s
    if wanted > loader.workers and gains and not is_full:
        return f"num_workers={wanted} instead of {loader.workers} ({numbers}){most}."
    if is_full or not gains:
        cores = f"{loader.cores:g} core{'' if loader.cores == 1 else 's'}"
        return (
            f"more workers do not help, for the cores are full ({numbers}, "
            f"{_s(main_s + step.making_cpu_s)} of processor time for a rank with {cores}){most}."
        )
    return f"loader.probe() measures which num_workers keeps up ({numbers}){most}."


def _most_of(making: Mapping[str, float]) -> str:
    part = max((p for p in making if p != "copy"), key=lambda p: making[p], default="fetch")
    return {
        "read": "faster or nearer storage, a larger interleave=, or files in place of a stream, "
        "which every rank reads whole: most of it is reading",
        "decode": "fewer columns=, or files that are cheaper to decode: most of it is decoding",
        "transform": "most of it is the transform: make it cheaper, or do it once and store it",
        "fetch": "most of it is the dataset's own items, what they read and how they transform it",
        "collate": "most of it is collate_fn",
    }[part]


def sentence(ranks: Sequence[int], of: int, step: MeanStep, loader: LoaderFacts) -> str:
    """Return what is said of ranks that wait, by the numbers of the one that waits most."""
    who = "All ranks wait" if len(ranks) == of > 1 else name_ranks(list(ranks)).capitalize()
    verb = "" if len(ranks) == of > 1 else " waits" if len(ranks) == 1 else " wait"
    split = ", ".join(
        f"{part} {_s(step.making[part])}" for part in MAKING if step.making.get(part, 0.0) > SHOWN_S
    )
    made = f"; making it: {split}" if split else ""
    return (
        f"{who}{verb} for {loader.name}: {100 * step.data_s / step.step_s:.0f} % of a step is data "
        f"({_s(step.data_s)} of {_s(step.step_s)}{made}). Do: {advice(step, loader)}"
    )


@dataclass(frozen=True, slots=True)
class FedRanks:
    """The mean steps of ranks that may wait, of so many, and the loaders that they had."""

    steps: Mapping[int, tuple[MeanStep, LoaderFacts]]
    ranks: int


def _starves(fed: FedRanks) -> str:
    waiting = {
        rank: (step, loader)
        for rank, (step, loader) in fed.steps.items()
        if step.data_s >= STARVED * step.step_s
    }
    if not waiting:
        return ""
    worst = max(waiting.values(), key=lambda one: one[0].data_s / one[0].step_s)
    return sentence(sorted(waiting), fed.ranks, *worst)


class Feeding(Watcher[FedRanks]):
    """One cell's loaders and steps."""

    kinds = frozenset(("loader", "step"))

    def __init__(self, cell: WatchedCell) -> None:
        """Begin with nothing known."""
        self._ranks = cell.ranks
        self._loaders: dict[tuple[int, float], LoaderFacts] = {}
        self._steps: defaultdict[int, deque[Mapping[str, float]]] = defaultdict(
            lambda: deque(maxlen=RECENT)
        )
        self._made: dict[int, int] = {}  # each rank's newest step

    def take(self, record: Record) -> FedRanks | None:
        """Take in a record; return mean steps, now and then."""
        values = record.values
        if record.kind == "loader":
            self._loaders[record.rank, values["loader"]] = LoaderFacts(
                int(values["prompt"]),
                int(values["line"]),
                int(values["workers"]),
                bool(values["pinned"]),
                bool(values["persistent"]),
                values["cores"],
            )
        elif record.step > max(1, self._made.get(record.rank, 0)):
            self._made[record.rank] = record.step
            if "data_s" in values and "step_s" in values and "batches" in values:
                self._steps[record.rank].append(values)
            if record.step % RECENT == 0 and self._is_heard(RECENT):
                return self._fed()
        return None

    def end(self) -> FedRanks | None:
        """Return mean steps, where there are enough."""
        return self._fed() if self._is_heard(ENOUGH_AT_END) else None

    def _fed(self) -> FedRanks:
        steps = {rank: mean for rank in self._ranks if (mean := self._mean(rank)) is not None}
        loaders = {rank: self._loaders.get((rank, self._newest(rank))) for rank in steps}
        return FedRanks(
            {rank: (step, loaders[rank] or LoaderFacts()) for rank, step in steps.items()},
            len(self._ranks),
        )

    def _newest(self, rank: int) -> float:
        """Return the number of the loader that a rank has used last; -1 without one."""
        return self._steps[rank][-1]["loader"] if self._steps[rank] else -1.0

    def _is_heard(self, steps: int) -> bool:
        return all(self._made.get(rank, 0) >= steps for rank in self._ranks)

    def _mean(self, rank: int) -> MeanStep | None:
        """Return a rank's mean step; None where it waits too little, as most do: means are dear."""
        newest = self._newest(rank)
        steps = [values for values in self._steps[rank] if values["loader"] == newest]
        if len(steps) < FEWEST:
            return None

        def mean(key: str) -> float:
            return fmean(values.get(key, 0.0) for values in steps)

        step_s, data_s = mean("step_s"), mean("data_s")
        if data_s < STARVED * step_s:
            return None
        shares = [values["data_s"] / values["step_s"] for values in steps if values["step_s"] > 0]
        return MeanStep(
            step_s,
            data_s,
            {part: mean(key) for part, key in MAKING.items()},
            mean("making_cpu_s"),
            mean("cpu_s"),
            mean("starved_s"),
            mean("batches"),
            is_seldom=median(shares) < STARVED / 2,
        )


def _s(seconds: float) -> str:
    return f"{seconds:.2g} s"


_LOADER = {
    "loader": 1,
    "prompt": 3,
    "line": 5,
    "workers": 0,
    "pinned": 0,
    "persistent": 0,
    "cores": 8,
}
_STEP = {
    "step_s": 0.1,
    "batches": 1,
    "loader": 1,
    "fetch_s": 0.06,
    "making_cpu_s": 0.0,
    "cpu_s": 0.04,
}
_SLOW = """import time
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 240
    def __getitem__(self, i):
        time.sleep(0.01)
        return torch.full((4,), i / 240)
"""
_LOOP = training(data="Slow()", x="x")


WAITS_FOR_LOADER = Rule(
    "waits-for-loader",
    "a fifth of a step or more is waiting for the loader",
    Feeding,
    _starves,
    remedy="Do what the sentence says: it follows from what batches took, and from the cores.",
    planted=both("loader", (0,), **_LOADER) + both("step", range(1, 30), data_s=0.06, **_STEP),
    sound=both("loader", (0,), **_LOADER) + both("step", range(1, 30), data_s=0.01, **_STEP),
    example=_SLOW + _LOOP,
    mended=_SLOW.replace("        time.sleep(0.01)\n", "") + _LOOP,
    sources=(
        "https://github.com/pytorch/examples/issues/387",
        "https://github.com/open-edge-platform/geti/pull/5958",
    ),
)
