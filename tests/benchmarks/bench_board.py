"""What one frame of the live board costs the notebook's kernel, in each of its views."""

import statistics
import time

from nbdist.client.board import VIEWS, palette
from nbdist.client.board.figure import Painter
from nbdist.client.board.look import look
from tests.unit.client.board.board_data import analysis_of, cell_info, training

GOAL_MS = 15.0  # the overview, 8 ranks x 1000 points


def frame_ms(ranks: int = 8, points: int = 1000, frames: int = 40, name: str = "overview") -> float:
    """Return the median of a frame in milliseconds: read the records, draw, write the PNG.

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
    return statistics.median(took)


if __name__ == "__main__":
    for name in VIEWS:
        costs = (f"{ranks:3d} ranks: {frame_ms(ranks, name=name):5.1f} ms" for ranks in (2, 8, 64))
        print(f"{name:12s} x 1000 points,  {'  '.join(costs)}  a frame", flush=True)
