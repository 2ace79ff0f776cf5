"""One step of a pipeline: which stage ran which micro-batch when, as ranks measured it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from nbdist.shared.text import figure


@dataclass(frozen=True, slots=True)
class StageRun:
    """A stage's work on one micro-batch; milliseconds since the step's first work.

    `kind` is F (forward), B (backward) or W (gradients of weights alone).
    """

    rank: int
    kind: str
    stage: int
    micro_batch: int
    begin_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """A step, with its work in the order of ranks and time."""

    step: int
    runs: tuple[StageRun, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, ascending."""
        return tuple(sorted({run.rank for run in self.runs}))

    @property
    def length_ms(self) -> float:
        """From the first work to the end of the last."""
        return max(run.end_ms for run in self.runs)

    @property
    def busy(self) -> float:
        """The share of the ranks' time in which they worked, from 0 to 1."""
        worked = sum(run.end_ms - run.begin_ms for run in self.runs)
        return worked / (self.length_ms * len(self.ranks))

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, ascending: one, or two where schedules interleave."""
        return sorted({run.stage for run in self.runs if run.rank == rank})

    def of_rank(self, rank: int) -> list[StageRun]:
        """Return a rank's work in the order of time."""
        return [run for run in self.runs if run.rank == rank]

    def __str__(self) -> str:
        """Return it in words: a sentence, and a line a rank; a stage behind a point if two are."""
        has_one = all(len(self.stages_of(rank)) == 1 for rank in self.ranks)
        count = len({run.micro_batch for run in self.runs})
        said = (
            f"Step {self.step} of a pipeline, as measured: {len(self.ranks)} ranks, {count} "
            f"micro-batches, {figure(self.length_ms)} ms, of which ranks worked {self.busy:.0%}."
        ).replace("%", " %")
        lines = (
            f"rank {rank}: {' '.join(_name(run, has_one) for run in self.of_rank(rank))}"
            for rank in self.ranks
        )
        return "\n".join([said, *lines])


def _name(run: StageRun, has_one: bool) -> str:
    name = f"{run.kind}{run.micro_batch}"
    return name if has_one else f"{name}.{run.stage}"


def pipeline_of(told: Mapping[int, Mapping[int, Mapping[str, float]]]) -> PipelineStep | None:
    """Return the newest step that all of these ranks have told of; None without one.

    Args:
        told: Rank to steps, to what `wire.stage_values` names. Ranks of several hosts have clocks
            of their own: there rows may be shifted by their difference.
    """
    common = set.intersection(*(set(steps) for steps in told.values())) if told else set()
    if not common:
        return None
    step = max(common)
    first_s = min(min(steps[step].values()) for steps in told.values())
    runs = []
    for rank, steps in sorted(told.items()):
        values = steps[step]
        for name in sorted((n for n in values if n.endswith(" began")), key=lambda n: values[n]):
            kind, stage, number, _ = name.split()
            ended_s = values[f"{kind} {stage} {number} ended"]
            moments = ((s - first_s) * 1e3 for s in (values[name], ended_s))
            runs.append(StageRun(rank, kind, int(stage), int(number), *moments))
    return PipelineStep(step, tuple(runs))
