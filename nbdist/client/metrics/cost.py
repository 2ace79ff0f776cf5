"""What watching a training costs, part by part: plain values, and the table that people read.

Processor time a step. It counts on the rank, the notebook, the controller and the process that
ships runs to MLflow: work that is moved elsewhere is not saved.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from nbdist.shared.text import MICROSECONDS, aligned, figure

DOES = {
    "tap": "counts, times and checks collectives",
    "hooks": "losses, and what steps are made of",
    "boundary": "what a step that is lost is made again from",
    "random": "takes the states of random generators at it",
    "checks": "compares ranks, now and then",
    "guard": "looks for gradients that are not finite, where asked for",
    "peers": "keeps snapshots in peers' memory, as asked for",
    "records": "sends the records",
    "output": "sends the text",
    "cell": "waits for the cell",
    "messages": "receives what ranks send",
    "analysis": "explains steps, finds stragglers",
    "board": "sends points and words to the page",
    "tracking": "makes MLflow's points",
    "shipping": "sends them to MLflow, and imports it once",
    "controller": "passes messages on, starts processes",
}


@dataclass(frozen=True, slots=True)
class RankCost:
    """What one rank says of its cell: microseconds of processor time a step, by part."""

    steps: int
    step_us: float
    measured_share: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CostLine:
    """One part. `us` a step: on each rank, the mean of all; elsewhere, for all ranks together."""

    part: str
    where: str
    us: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What watching costs in the newest cell that trains. Prints as a table.

    `step_us` is the wall time of a step, `measured_share` the share of steps that are measured in
    full; 0 steps where nothing was trained.
    """

    steps: int = 0
    step_us: float = 0.0
    measured_share: float = 1.0
    lines: tuple[CostLine, ...] = ()

    def us(self, where: str) -> float:
        """Return microseconds a step on each "rank", or in the "notebook" and beside it."""
        return sum(line.us for line in self.lines if line.where == where)

    def __str__(self) -> str:
        if not self.steps:
            return (
                "No cost is known yet: no cell has trained since the ranks started, or the last "
                "that did made fewer than two steps."
            )
        said = (
            f"Watching costs each rank {figure(self.us('rank'))} {MICROSECONDS} a step, "
            f"{self._per_cent(self.us('rank'))} of {figure(self.step_us / 1e3)} ms, "
        )
        if any(line.where == "notebook" for line in self.lines):
            spent = self.us("notebook")
            said += f"and the notebook {figure(spent)} {MICROSECONDS}, "
            said += f"{self._per_cent(spent)}, for all ranks."
        else:
            said += "and the cell was too short to tell what the notebook did."
        rows = [("part", "where", f"{MICROSECONDS} a step", "of a step", "what it does")]
        rows += [
            (line.part, line.where, figure(line.us), self._per_cent(line.us), DOES[line.part])
            for line in self.lines
        ]
        return "\n".join(
            [said, *self._sampling(), *aligned(rows, (False, False, True, True, False))]
        )

    def __repr__(self) -> str:
        return str(self)

    def _sampling(self) -> list[str]:
        if self.measured_share > 0.999:
            return []
        share = (
            f"To keep that low, {100 * self.measured_share:.2g} % of the steps are measured part "
            "by part. Losses, times, bytes and counts are of all."
        )
        return [share]

    def _per_cent(self, us: float) -> str:
        share = 100 * us / self.step_us if self.step_us else math.nan
        return f"{share:.0f} %" if share >= 10 else f"{share:.2g} %" if share >= 0 else ""


def cost_of(ranks: Sequence[RankCost], elsewhere_s: Mapping[str, float], steps: int) -> Cost:
    """Return what watching costs.

    Args:
        ranks: Of those that have trained.
        elsewhere_s: Seconds beside the ranks, by part, while `steps` steps were made.
        steps: That many; 0 where it is not known.
    """
    if not ranks:
        return Cost()
    parts = dict.fromkeys(part for rank in ranks for part in rank.parts)
    lines = [
        CostLine(part, "rank", mean(rank.parts.get(part, 0.0) for rank in ranks)) for part in parts
    ]
    if steps > 0:  # ranks that are replaced count from zero
        lines += [
            CostLine(part, "notebook", 1e6 * seconds / steps)
            for part, seconds in elsewhere_s.items()
            if part in DOES
        ]
    return Cost(
        max(rank.steps for rank in ranks),
        mean(rank.step_us for rank in ranks),
        mean(rank.measured_share for rank in ranks),
        tuple(lines),
    )
