"""A step of a pipeline as a moving picture: work appears as it was done, at a slower pace.

Composed twice, with all of the work and with its places alone; a frame has the first left of a
line that moves, and the second right of it. A GIF, which front ends play without JavaScript.
Importing this module loads matplotlib (0.2 s).
"""

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from PIL import Image, ImageDraw

from nbdist.client.board.drawn.measures import MARGIN_PX, TEXT_PT, WIDE
from nbdist.client.board.drawn.page import Page
from nbdist.client.board.palette import PAPER, Theme
from nbdist.client.board.scene.stages import PipelineStep, StageRun
from nbdist.client.board.text import tick

FRAMES: Final = 30
FRAME_MS, LAST_MS = 120, 2500
# Of a rank's first stage, and of its second.
_COLORS: Final = {
    "F": ("#578dff", "#b4cdff"),
    "B": ("#c47a10", "#ecc586"),
    "W": ("#97975f", "#cfcfb2"),
}
_NAMES: Final = {"F": "forward", "B": "backward", "W": "backward of weights alone"}
_LANE_PX, _LEFT_PX, _BELOW_PX, _LEGEND_PX = 26, 64, 44, 26
_LEAST_PX = 12  # of a bar that has its number


@dataclass(frozen=True, slots=True)
class Animation:
    """A moving picture that a notebook shows, and its words: `gif` and `text`."""

    gif: bytes
    text: str

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        source = base64.b64encode(self.gif).decode("ascii")
        alt = html.escape(self.text, quote=True)
        style = f"width: 100%; max-width: {WIDE}px; height: auto"
        page = f'<img alt="{alt}" src="data:image/gif;base64,{source}" style="{style}">'
        return {"text/html": page, "text/plain": self.text}


def animate(step: PipelineStep, emulated: str = "") -> Animation:
    """Return a step's animation.

    Args:
        step: As it was measured.
        emulated: The virtual machine that ranks stood for; empty without one.
    """
    head = f"step {step.step}, measured   ·   {step.busy:.0%} of the ranks' time is work"
    if emulated:
        head += f"   ·   Emulated: {emulated}"
    whole, left, right = _composed(step, head, alpha=1.0)
    places, *_ = _composed(step, head, alpha=0.15)
    frames = [
        _frame(whole, places, int(left + (right - left) * at / FRAMES)) for at in range(FRAMES)
    ]
    said = f"Emulated: {emulated}. {step}" if emulated else str(step)
    return Animation(gif_of([*frames, whole]), said)


def gif_of(frames: Sequence[Image.Image], frame_ms: int = FRAME_MS) -> bytes:
    """Return frames as a GIF that begins again for ever; the last one stays for a while."""
    out = io.BytesIO()
    few = [frame.quantize(32, dither=Image.Dither.NONE) for frame in frames]
    few[0].save(
        out, "GIF", save_all=True, append_images=few[1:], loop=0, optimize=True,
        duration=[frame_ms] * (len(few) - 1) + [LAST_MS],
    )  # fmt: skip
    return out.getvalue()


def _composed(step: PipelineStep, head: str, alpha: float) -> tuple[Image.Image, float, float]:
    """Return the picture, and where its time begins and ends in it, in pixels."""
    ranks, theme = step.ranks, Theme("#333333", PAPER)
    height = _LEGEND_PX + _LANE_PX * len(ranks) + _BELOW_PX
    page = Page(theme, WIDE, height, 1.0, [head.replace("%", " %")])
    kinds = [kind for kind in _COLORS if any(run.kind == kind for run in step.runs)]
    samples = [Patch(color=_COLORS[kind][0], label=_NAMES[kind]) for kind in kinds]
    if any(len(step.stages_of(rank)) > 1 for rank in ranks):
        samples += [Patch(color=_COLORS["F"][1], label="light: the rank's later stage")]
    page.legend(samples, "left")
    width = WIDE - _LEFT_PX - MARGIN_PX
    axes = page.axes(_LEFT_PX, _LEGEND_PX, width, _LANE_PX * len(ranks))
    axes.set_xlim(0, step.length_ms)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.grid(visible=False)
    axes.xaxis.set_major_formatter(lambda value, at: f"{tick(value)} ms")
    for run in step.runs:
        is_later = run.stage > step.stages_of(run.rank)[0]
        _bar(axes, run, ranks.index(run.rank), _COLORS[run.kind][is_later], alpha)
        if alpha == 1.0 and (run.end_ms - run.begin_ms) * width / step.length_ms >= _LEAST_PX:
            middle = (run.begin_ms + run.end_ms) / 2
            axes.text(
                middle, ranks.index(run.rank), str(run.micro_batch), ha="center", va="center",
                fontsize=TEXT_PT, color="black",
            )  # fmt: skip
    pixels = Image.fromarray(np.array(page.pixels())).convert("RGB")
    return pixels, _LEFT_PX, _LEFT_PX + width


def _bar(axes: Axes, run: StageRun, lane: int, color: str, alpha: float) -> None:
    axes.barh(
        lane, run.end_ms - run.begin_ms, left=run.begin_ms, height=0.8, color=color, alpha=alpha,
        edgecolor=PAPER, linewidth=0.7,
    )  # fmt: skip


def _frame(whole: Image.Image, places: Image.Image, until: int) -> Image.Image:
    frame = places.copy()
    frame.paste(whole.crop((0, 0, until, whole.height)), (0, 0))
    top = whole.height - _BELOW_PX
    ImageDraw.Draw(frame).line([(until, 30 + _LEGEND_PX), (until, top)], fill="#333333")
    return frame
