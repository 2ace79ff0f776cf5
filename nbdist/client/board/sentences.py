"""The sentences about verdicts, or why there is none; verdict_block.py shows the first.

Sentences hold the numbers of now, so they are never part of what nbval compares.
"""

from typing import TYPE_CHECKING

from nbdist.client.metrics.analysis.values import RECENT
from nbdist.shared.text import counted

if TYPE_CHECKING:  # for its type alone: the scene loads numpy
    from nbdist.client.board.scene.scene import Scene

NOT_EXPLAINED = "What ranks wait for is not known yet: their collectives have not been compared."
NOT_TIMED = (
    "Communication was not timed, so it is unknown which ranks wait: %config NBDist.tap is not "
    "'full'."
)


def verdicts(scene: "Scene") -> list[str]:
    """Return the verdicts; where there is none, that none is, or why none can be."""
    if scene.analysis.verdicts:
        return [verdict.sentence for verdict in scene.analysis.verdicts]
    if scene.last_step == 0:
        return ["No step has completed yet."]
    if len(scene.rows) == 1:
        return ["There is only one rank, so there is nothing to compare."]
    if scene.first_step < RECENT:
        furthest = min(scene.reporting, key=lambda row: row.step)
        made = counted(furthest.step, "step")
        return [
            f"Too early to tell: {RECENT} steps are needed, and rank {furthest.rank} made {made}."
        ]
    if not scene.is_timed:
        return [NOT_TIMED]
    if not scene.analysis.ranks:
        return [NOT_EXPLAINED]
    return [f"No rank stands out over the last {RECENT} steps."]
