"""Notice that ranks wait for their loader, and say which number to raise, or what else to change.

`advice` is the pure decision, on one rank's mean step; `Starving` gathers it in one cell.

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


class Starving:
    """One cell's loaders and steps."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """Begin with nothing known of these ranks."""
        self._ranks = tuple(ranks)
        self._loaders: dict[tuple[int, float], LoaderFacts] = {}
        self._steps: defaultdict[int, deque[Mapping[str, float]]] = defaultdict(
            lambda: deque(maxlen=RECENT)
        )
        self._made: dict[int, int] = {}  # each rank's newest step

    def take(self, record: Record) -> str:
        """Take in a record; return a sentence where ranks wait too long for a loader, else ""."""
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
        elif record.kind == "step" and record.step > max(1, self._made.get(record.rank, 0)):
            self._made[record.rank] = record.step
            if "data_s" in values and "step_s" in values and "batches" in values:
                self._steps[record.rank].append(values)
            if record.step % RECENT == 0 and self._is_heard(RECENT):
                return self.line()
        return ""

    def line(self, *, is_last: bool = False) -> str:
        """Return the same of all that was heard; with `is_last`, no more records will come."""
        if is_last and not self._is_heard(ENOUGH_AT_END):
            return ""
        waiting = {
            rank: step
            for rank in self._ranks
            if (step := self._mean(rank)) is not None and step.data_s >= STARVED * step.step_s
        }
        if not waiting:
            return ""
        worst = max(waiting, key=lambda rank: waiting[rank].data_s / waiting[rank].step_s)
        newest = self._steps[worst][-1]["loader"]
        loader = self._loaders.get((worst, newest), LoaderFacts())
        return sentence(sorted(waiting), len(self._ranks), waiting[worst], loader)

    def _is_heard(self, steps: int) -> bool:
        return all(self._made.get(rank, 0) >= steps for rank in self._ranks)

    def _mean(self, rank: int) -> MeanStep | None:
        newest = self._steps[rank][-1]["loader"] if self._steps[rank] else None
        steps = [values for values in self._steps[rank] if values["loader"] == newest]
        if len(steps) < FEWEST:
            return None

        def mean(key: str) -> float:
            return fmean(values.get(key, 0.0) for values in steps)

        shares = [values["data_s"] / values["step_s"] for values in steps if values["step_s"] > 0]
        return MeanStep(
            mean("step_s"),
            mean("data_s"),
            {part: mean(key) for part, key in MAKING.items()},
            mean("making_cpu_s"),
            mean("cpu_s"),
            mean("starved_s"),
            mean("batches"),
            is_seldom=median(shares) < STARVED / 2,
        )


def _s(seconds: float) -> str:
    return f"{seconds:.2g} s"
