"""The content of the board now, as plain values: one `Scene`, whichever of its views is chosen.

look.py reads it from a cell's telemetry; board/figure.py draws it, text.py, sentences.py and
tables.py beside that say it. Times are in milliseconds, as people read them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from nbdist.client.board.scales import Floats
from nbdist.client.board.scene.experts import ExpertTokens
from nbdist.client.board.scene.stages import PipelineStep
from nbdist.client.metrics.analysis.values import PARTS, Analysis, RankStep
from nbdist.client.metrics.recent import RecentSteps, comm_pct, data_pct, divided, making_ms
from nbdist.client.metrics.telemetry import IDLE_S

BOTH = "compute and communication"  # a part of steps whose communication was not measured
ALL = -1  # the rank of a line that is of all of them
SEEN = 4e-3  # share of the longest step from which a part is seen: half a pixel
IDLE_STEPS = 10  # so many a training may be quiet, and `IDLE_S`
EXPOSED = "transfer", "waiting", "communication"  # parts of a step that are not a rank's own work
REPORT_S = 0.75  # ranks send records every half second, a busy machine later


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """One rank's history of one number; `x` and `y` of one length, at least 1.

    `of` is how many points it had before it was thinned; 0 where it was not.
    """

    rank: int
    x: Floats
    y: Floats
    of: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """One plot over the steps.

    `floor` is a value that must stay in sight, such as 0; `by` is what x counts: "step", "record"
    where nothing steps, "second" of devices; `top` is the end of a scale that is given.
    """

    key: str
    title: str
    unit: str
    lines: tuple[Curve, ...]
    floor: float | None = None
    by: str = "step"
    top: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One rank in the table; None where the rank has not said.

    `memory_bytes` is that of the process, `cuda_bytes` what is allocated on its device now,
    `cuda_peak_bytes` the most that was, and `cuda_reserved_bytes` what torch holds there.
    `of_device` has the values of the newest record of kind "device", by its names. Under ep
    `expert_tokens` came to its experts in the newest step, `expert_load` times an even share.
    """

    rank: int
    device: str
    step: int
    loss: float | None
    steps_per_s: float | None
    step_ms: float | None
    comm_pct: float | None
    data_pct: float | None
    own: Mapping[str, float]
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    memory_bytes: float | None = None
    cuda_bytes: float | None = None
    cuda_peak_bytes: float | None = None
    cuda_reserved_bytes: float | None = None
    of_device: Mapping[str, float] = field(default_factory=dict)
    expert_tokens: float | None = None
    expert_load: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """The parts of a recent step: milliseconds, one entry per rank of `ranks`.

    `parts` in the order in which they are stacked, which sum to the step: the seven of
    `metrics.analysis.values`, or five while it is unknown what was hidden and who waited; `BOTH` in
    place of those that communication was not measured for. `waits_for` holds, of ranks that wait,
    for whom and how long.
    """

    ranks: tuple[int, ...]
    parts: Mapping[str, Floats]
    waits_for: Mapping[int, tuple[int, float]]

    @property
    def whole_ms(self) -> Floats:
        """Return the length of a step, by rank."""
        whole: Floats = np.sum(list(self.parts.values()), axis=0)
        return whole

    @property
    def seen(self) -> tuple[str, ...]:
        """Return the parts that are wide enough to be seen."""
        least = SEEN * float(self.whole_ms.max(initial=0.0))
        return tuple(name for name, part in self.parts.items() if part.max(initial=0.0) > least)


@dataclass(frozen=True, slots=True)
class Epoch:
    """Progress of the current pass over the loader: `done` of `steps`.

    How many passes will follow is unknown, so this is not the progress of the whole loop.
    """

    done: int
    steps: int

    def __str__(self) -> str:
        return f"{self.done:,}/{self.steps:,} of this epoch"


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """All that the board shows now, in any of its views.

    `recent` is what each rank's recent steps were like; `paces` the time of each step, by rank;
    `analysis` what is known of steps and collectives; `norm` that of the whole gradient, one line;
    `devices` what processes and devices do over the seconds, and `gpu_unknown` says what of GPUs is
    not known. `emulated` is the device and link that each rank stands for, empty where it is this
    machine's. `marks` are steps with what was there in words: a change made by hand after it, or
    that it was left out. `history` is what steps were made of over the whole run, a panel a part
    (see part_history.py), only once the cell has ended. `outcome` is how the cell ended, finished,
    failed or interrupted; None while it runs. `idle_s` is for how long no step and no logged value
    had come when the scene was read. `paused_at` is the step after which a person has paused the
    cell. `experts` is None where no layout with ep has trained, `pipeline` where none with pp has.
    """

    panels: tuple[Panel, ...]
    recent: Mapping[int, RecentSteps]
    rows: tuple[Row, ...]
    epoch: Epoch | None
    paces: Panel | None = None
    analysis: Analysis = field(default_factory=Analysis)
    norm: Panel | None = None
    devices: tuple[Panel, ...] = ()
    gpu_unknown: str = ""
    emulated: str = ""
    marks: tuple[tuple[int, str], ...] = ()
    history: tuple[Panel, ...] = ()
    outcome: str | None = None
    idle_s: float = 0.0
    paused_at: int | None = None
    experts: ExpertTokens | None = None
    pipeline: PipelineStep | None = None

    def panel(self, key: str) -> Panel:
        """Return the plot of `key`, which must be there."""
        if self.norm is not None and self.norm.key == key:
            return self.norm
        return next(panel for panel in self.panels if panel.key == key)

    @property
    def reporting(self) -> tuple[Row, ...]:
        """Return the ranks that have said anything."""
        return tuple(row for row in self.rows if row.step or row.own)

    @property
    def first_step(self) -> int:
        """Return the step of the rank that is furthest behind."""
        return min((row.step for row in self.reporting), default=0)

    @property
    def last_step(self) -> int:
        """Return the step of the rank that is furthest ahead."""
        return max((row.step for row in self.rows), default=0)

    @property
    def step(self) -> int:
        """Return the step that a sentence is about: once it is over the last one, as in the run.

        A rank that was killed has not reported its last ones: the steps of all do not include them.
        """
        return self.first_step if self.outcome is None else self.last_step

    @property
    def losses(self) -> dict[int, float]:
        """Return the newest losses by rank: at the end of those that made the last step."""
        ended = self.outcome is not None
        rows = [row for row in self.rows if not ended or row.step == self.last_step]
        return {row.rank: row.loss for row in rows if row.loss is not None}

    @property
    def records(self) -> int:
        """Return how many records the longest line shows, 1 when there is no line."""
        return max((len(line.x) for panel in self.panels for line in panel.lines), default=1)

    @property
    def steps_per_s(self) -> float | None:
        """Return the rate of the slowest rank."""
        return min((row.steps_per_s for row in self.rows if row.steps_per_s), default=None)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks of the cell."""
        return tuple(row.rank for row in self.rows)

    @property
    def is_paused(self) -> bool:
        """Return whether a person has paused it, and no step has come since."""
        return self.paused_at is not None and self.last_step <= self.paused_at

    @property
    def stands_still(self) -> bool:
        """Return whether nothing has come for longer than the steps so far let one expect."""
        if self.is_paused:
            return False
        step_s = 1 / self.steps_per_s if self.steps_per_s else 0.0
        return self.idle_s > max(IDLE_S, IDLE_STEPS * step_s)

    def state(self, row: Row) -> str:
        """Return what a rank does, as far as its records show."""
        if row not in self.reporting:
            return "silent"
        if self.last_step and self.is_behind and row.step == self.first_step:
            return "behind"
        if self.outcome is not None:
            # The error names the rank that failed first: here all of them have ended.
            return "ended" if self.outcome == "failed" else self.outcome
        return "trains" if self.last_step else "logs"

    @property
    def is_behind(self) -> bool:
        """Return whether a rank is further behind than its reports may be late."""
        # Equal steps may be reported at different times.
        return self.last_step - self.first_step > 2 + (self.steps_per_s or 0.0) * REPORT_S

    @property
    def stack(self) -> Stack | None:
        """Return what a step is made of, as fully as it is known; None before the first step."""
        ranks = tuple(rank for rank, steps in sorted(self.recent.items()) if steps.parts)
        if not ranks:
            return None
        explained = {rank.rank: rank for rank in self.analysis.ranks if "waiting" in rank.parts}
        steps = [self.recent[rank] for rank in ranks]
        if not any("comm" in rank.parts for rank in steps):
            names = {BOTH: "compute", "data": "data", "optimizer": "optimizer"}
        else:
            names = {"compute": "compute", "communication": "comm"}
            names |= {"data": "data", "optimizer": "optimizer"}
            if explained:
                return self._explained(ranks, explained)
        parts = {
            name: np.array([rank.parts.get(key, 0.0) for rank in steps])
            for name, key in names.items()
        }
        return Stack(ranks, parts | {"other": np.array([rank.other_ms for rank in steps])}, {})

    def _explained(self, ranks: tuple[int, ...], explained: Mapping[int, RankStep]) -> Stack:
        """Return the parts of steps whose collectives have been compared."""
        divisions = [divided(self.recent[rank], explained.get(rank)) for rank in ranks]
        parts = {part: np.array([of_rank[part] for of_rank in divisions]) for part in PARTS}
        waits = {}
        for rank, of_rank in zip(ranks, divisions, strict=True):
            found = explained[rank].waits_for if rank in explained else None
            if found is not None:
                peer, time_ms = found
                share = time_ms / explained[rank].parts["waiting"]
                waits[rank] = peer, share * of_rank["waiting"]
        return Stack(ranks, parts, waits)

    def own_work_ms(self, stack: Stack) -> Floats:
        """Return a step without its exposed communication, by rank, over the verdicts' own steps.

        It is what verdicts compare: for a slow link is no work.
        """
        judged = self.analysis.own_ms
        if all(rank in judged for rank in stack.ranks):
            return np.array([judged[rank] for rank in stack.ranks])
        own = [part for name, part in stack.parts.items() if name not in EXPOSED]
        whole: Floats = np.sum(own, axis=0)
        return whole

    @property
    def is_timed(self) -> bool:
        """Return whether communication was measured; True before the first step."""
        stack = self.stack
        return stack is None or BOTH not in stack.parts

    @property
    def comm_pct(self) -> float | None:
        """Return how much of a step is exposed communication; None where none was measured."""
        return comm_pct(self.recent.values())

    @property
    def data_pct(self) -> float | None:
        """The share of a step that the loop waits for its loader, in percent, over all ranks."""
        return data_pct(self.recent.values())

    @property
    def making_ms(self) -> dict[str, float]:
        """The time to make the batches of a step, by part, milliseconds; {} where not measured."""
        return making_ms(self.recent.values())

    @property
    def slow(self) -> frozenset[int]:
        """Return the ranks that a verdict says make the others slow."""
        return frozenset(verdict.rank for verdict in self.analysis.verdicts)
