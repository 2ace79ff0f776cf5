"""What one frame of the live board costs the notebook's kernel."""

import statistics
import time

from nbdist.client.board import palette
from nbdist.client.board.figure import Painter
from nbdist.client.board.look import look
from tests.unit.board_data import cell_info, training

GOAL_MS = 15.0  # 8 ranks x 1000 points


def frame_ms(ranks: int = 8, points: int = 1000, frames: int = 40) -> float:
    """Return the median of a frame in milliseconds: read the records, draw, write the PNG.

    Processor time of the drawing thread, which a busy machine does not stretch.
    """
    telemetry, info = training(ranks, points, straggler=0), cell_info(ranks)
    painter = Painter(palette.theme_named("auto"))
    painter.frame(look(telemetry, info))
    took = []
    for _ in range(frames):
        began = time.thread_time()
        painter.frame(look(telemetry, info))
        took.append((time.thread_time() - began) * 1e3)
    return statistics.median(took)


if __name__ == "__main__":
    for ranks in (2, 8, 64):
        print(f"{ranks:3d} ranks x 1000 points: {frame_ms(ranks):5.1f} ms a frame")
