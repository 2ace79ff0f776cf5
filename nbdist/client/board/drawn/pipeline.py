"""A step of a pipeline as a moving picture: which stage ran which micro-batch when."""

from typing import Final

from matplotlib.patches import Patch

from nbdist.client.board.drawn.animation import Animation, Bar, moving
from nbdist.client.board.scene.scene import Scene
from nbdist.shared.errors import ClusterError

# Of a rank's first stage, and of its second.
_COLORS: Final = {
    "F": ("#578dff", "#b4cdff"),
    "B": ("#c47a10", "#ecc586"),
    "W": ("#97975f", "#cfcfb2"),
}
_NAMES: Final = {"F": "forward", "B": "backward", "W": "backward of weights alone"}


def animate(scene: Scene) -> Animation:
    """Return the animation of a scene's pipeline, as it was measured.

    Raises:
        ClusterError: It has none.
    """
    step = scene.pipeline
    if step is None:
        raise ClusterError(
            "There is no step of a pipeline to show.",
            why="the last cell that trained has run none",
            do='train with nbdist.parallelize(model, "pp=2") and layout.step(...)',
        )
    head = f"step {step.step}, measured   ·   {step.busy:.0%} of the ranks' time is work"
    if scene.emulated:
        head += f"   ·   Emulated: {scene.emulated}"
    ranks = step.ranks
    kinds = [kind for kind in _COLORS if any(run.kind == kind for run in step.runs)]
    samples = [Patch(color=_COLORS[kind][0], label=_NAMES[kind]) for kind in kinds]
    if any(len(step.stages_of(rank)) > 1 for rank in ranks):
        samples += [Patch(color=_COLORS["F"][1], label="light: the rank's later stage")]
    bars = []
    for run in step.runs:
        color = _COLORS[run.kind][run.stage > step.stages_of(run.rank)[0]]
        lane, number = ranks.index(run.rank), str(run.micro_batch)
        bars.append(Bar(lane, run.begin_ms, run.end_ms, color, number))
    names = [f"rank {rank}" for rank in ranks]
    said = f"Emulated: {scene.emulated}. {step}" if scene.emulated else str(step)
    return Animation(moving([head], names, bars, samples, step.length_ms), said)
