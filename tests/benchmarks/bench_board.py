"""What one frame of the live board costs the notebook's kernel, in each of its views."""

import statistics
import time

from nbdist.client.board import VIEWS, palette
from nbdist.client.board.figure import Painter
from nbdist.client.board.look import look
from tests.benchmarks.table import Row, apart
from tests.unit.client.board.board_data import analysis_of, cell_info, training

GOAL_MS = 10.0  # the overview, 8 ranks x 1000 points


def frames_ms(
    ranks: int = 8, points: int = 1000, frames: int = 40, name: str = "overview"
) -> list[float]:
    """Return what frames take in milliseconds: read the records, draw, write the PNG.

    Processor time of the drawing thread, which a busy machine does not stretch.
    """
    telemetry, info = training(ranks, points), cell_info(ranks)
    known = analysis_of(ranks, points, slow=0 if ranks > 1 else None)
    painter = Painter(palette.theme_named("auto"), name=name)
    painter.frame(look(telemetry, info, known, name=name))
    took = []
    for _ in range(frames):
        began = time.thread_time()
        painter.frame(look(telemetry, info, known, name=name))
        took.append((time.thread_time() - began) * 1e3)
    return took


def rows() -> list[Row]:
    """Return the row of the overview; the noise is between every other frame and the rest."""
    took = frames_ms()
    noise = apart(took[::2], took[1::2])
    what = "a frame of the board, 8 ranks x 1000 points"
    median = statistics.median(took)
    return [Row(what, median, "ms", noise=noise, goal=GOAL_MS, goal_on="measured")]


if __name__ == "__main__":
    for name in VIEWS:
        medians = {n: statistics.median(frames_ms(n, name=name)) for n in (2, 8, 64)}
        costs = (f"{n:3d} ranks: {ms:5.1f} ms" for n, ms in medians.items())
        print(f"{name:12s} x 1000 points,  {'  '.join(costs)}  a frame", flush=True)
