"""A step with parameters in shards as a moving picture: how much of each unit a rank holds when."""

from typing import Final

from matplotlib.patches import Patch

from nbdist.client.board.drawn.animation import Animation, Bar, moving
from nbdist.client.board.scene.scene import Scene
from nbdist.client.board.scene.shards import shards_of
from nbdist.shared.errors import ClusterError
from nbdist.shared.text import figure, name_bytes

_COLORS: Final = {
    "gathered": ("#578dff", "all_gather"),
    "again": ("#3d5bf0", "all_gather again, for backward"),
    "whole": ("#cfdfff", "whole"),
    "reduced": ("#c47a10", "gradients reduced"),
    "own": ("#b3b3b3", "the rank's own shard"),
}
_LONGEST, _LEFT_PX = 20, 150  # letters of a unit's name
_TALL_PX = 400  # of all lanes, while each has 6


def animate(scene: Scene) -> Animation:
    """Return the animation of the newest step whose parameters were gathered from shards.

    Raises:
        ClusterError: There is none.
    """
    step = shards_of(scene.analysis)
    if step is None:
        raise ClusterError(
            "There is no step with parameters in shards to show.",
            why="no recent step of the last training has gathered any",
            do='train with nbdist.parallelize(model, "zero3"), "zero2" or torch\'s fully_shard',
        )
    units = list(step.bytes)
    bars = [
        Bar(units.index(run.unit), run.begin_ms, run.end_ms, _COLORS[run.kind][0])
        for run in step.runs
    ]
    lane_px = max(6, min(26, _TALL_PX // len(units)))
    share = max(1 / step.n, 2 / lane_px)  # it must be seen
    own = _COLORS["own"][0]
    bars += [Bar(at, 0, step.length_ms, own, share=share) for at in range(len(units))]
    whole = f"at most {step.most:.0%} of {name_bytes(sum(step.bytes.values()))} whole at a time"
    head = [
        f"step {step.step} on rank {step.rank}, {figure(step.length_ms)} ms   ·   {whole}",
        f"measured: bytes and times   ·   the algorithm's: that each rank keeps 1/{step.n} of all",
        *([f"Emulated: {scene.emulated}"] if scene.emulated else []),
    ]
    kinds = [k for k in _COLORS if k == "own" or any(run.kind == k for run in step.runs)]
    samples = [Patch(color=_COLORS[kind][0], label=_COLORS[kind][1]) for kind in kinds]
    names = [unit if len(unit) <= _LONGEST else f"{unit[: _LONGEST - 1]}…" for unit in units]
    picture = moving(head, names, bars, samples, step.length_ms, _LEFT_PX, lane_px)
    said = f"Emulated: {scene.emulated}. {step}" if scene.emulated else str(step)
    return Animation(picture, said)
