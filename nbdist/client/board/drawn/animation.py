"""Moving pictures of work in lanes: bars appear as they were done, at a slower pace.

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
from matplotlib.patches import Patch, Rectangle
from PIL import Image, ImageDraw

from nbdist.client.board.drawn.measures import HEAD_PX, LINE_PX, MARGIN_PX, TEXT_PT, WIDE
from nbdist.client.board.drawn.page import Page
from nbdist.client.board.palette import PAPER, Theme
from nbdist.client.board.text import tick

FRAMES: Final = 30
FRAME_MS, LAST_MS = 120, 2500
_BELOW_PX, _LEGEND_PX = 44, 26
_LEAST_PX, _SEEN_PX = 12, 1.5  # of a bar that has its number; of any
_NAME_PX = 12  # of lanes with one name
_FULL = 0.8  # of a lane: its highest bar


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


@dataclass(frozen=True, slots=True)
class Bar:
    """Work in a lane from when to when; `share` is how much of its height it takes, from below."""

    lane: int
    begin_ms: float
    end_ms: float
    color: str
    label: str = ""
    share: float = 1.0


def moving(
    head: Sequence[str], names: Sequence[str], bars: Sequence[Bar], samples: Sequence[Patch],
    length_ms: float, left_px: int = 64, lane_px: int = 26,
) -> bytes:  # fmt: skip
    """Return lanes of these names that fill with bars, drawn in their order, as a GIF."""
    width, tall = WIDE - left_px - MARGIN_PX, lane_px * len(names)
    top = HEAD_PX + LINE_PX * (len(head) - 1) + _LEGEND_PX

    def composed(alpha: float) -> Image.Image:
        page = Page(
            Theme("#333333", PAPER), WIDE, _LEGEND_PX + tall + _BELOW_PX, 1.0,
            [line.replace("%", " %") for line in head],
        )  # fmt: skip
        page.legend(samples, "left")
        axes = page.axes(left_px, _LEGEND_PX, width, tall)
        axes.set_xlim(0, length_ms)
        axes.set_ylim(len(names) - 0.5, -0.5)
        every = -(-_NAME_PX // lane_px)
        axes.set_yticks(range(0, len(names), every), names[::every])
        axes.grid(visible=False)
        axes.xaxis.set_major_formatter(lambda value, at: f"{tick(value)} ms")
        for bar in bars:
            _draw(axes, bar, alpha, length_ms / width)
        return Image.fromarray(np.array(page.pixels())).convert("RGB")

    whole, places = composed(1.0), composed(0.15)
    until = (int(left_px + width * at / FRAMES) for at in range(FRAMES))
    return gif_of([*(_frame(whole, places, at, top) for at in until), whole])


def gif_of(frames: Sequence[Image.Image], frame_ms: int = FRAME_MS) -> bytes:
    """Return frames as a GIF that begins again for ever; the last one stays for a while."""
    out = io.BytesIO()
    # One palette for all of them: then a frame takes what has changed alone.
    some = [frames[len(frames) * at // 4] for at in range(4)] + [frames[-1]]
    beside = Image.fromarray(np.concatenate([np.array(frame) for frame in some]))
    palette = beside.quantize(48, Image.Quantize.MAXCOVERAGE)
    few = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    few[0].save(
        out, "GIF", save_all=True, append_images=few[1:], loop=0, optimize=True,
        duration=[frame_ms] * (len(few) - 1) + [LAST_MS],
    )  # fmt: skip
    return out.getvalue()


def _draw(axes: Axes, bar: Bar, alpha: float, px_ms: float) -> None:
    length_ms, height = bar.end_ms - bar.begin_ms, _FULL * bar.share
    place = bar.begin_ms, bar.lane + _FULL / 2 - height
    axes.add_patch(
        Rectangle(
            place, max(length_ms, _SEEN_PX * px_ms), height, facecolor=bar.color, alpha=alpha,
            edgecolor=PAPER, linewidth=0.7 if bar.label else 0,
        )
    )  # fmt: skip
    if bar.label and alpha == 1.0 and length_ms >= _LEAST_PX * px_ms:
        middle = (bar.begin_ms + bar.end_ms) / 2
        axes.text(
            middle, bar.lane, bar.label, ha="center", va="center", fontsize=TEXT_PT, color="black"
        )


def _frame(whole: Image.Image, places: Image.Image, until: int, top: int) -> Image.Image:
    frame = places.copy()
    frame.paste(whole.crop((0, 0, until, whole.height)), (0, 0))
    line = [(until, top), (until, whole.height - _BELOW_PX)]
    ImageDraw.Draw(frame).line(line, fill="#333333")
    return frame
