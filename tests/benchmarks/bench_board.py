"""What a frame of the live board costs the notebook's kernel: from records to bytes on the wire.

The kernel's part of a frame is all here: the records' messages are read, remembered and handed to
who listens, the new points are taken, words are worked out once a second, and all of it is sent
over a socket, as ipykernel does. Drawing is the page's.
"""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import comm
import zmq
from comm.base_comm import BaseComm
from jupyter_client.session import Session

from nbdist.client.board import palette
from nbdist.client.board.live.live import PERIOD_S, WORDS_S
from nbdist.client.board.live.points import PointStream
from nbdist.client.board.live.words import frame_of, words_of
from nbdist.client.board.scene.look import look
from nbdist.client.metrics.telemetry import Telemetry
from nbdist.shared.wire import Batch
from tests.benchmarks.table import Row, apart
from tests.unit.client.board.board_data import analysis_of, cell_info, steps_of, training

GOAL_MS = 1.0  # 8 ranks x 10,000 points
STEP_S = 0.01
RECORDS_S = 0.5  # between two messages of a rank


class _SentComm(BaseComm):
    """A comm whose messages leave over a socket, signed and packed as a kernel's are."""

    session = Session(key=b"0")
    socket: zmq.Socket[bytes]

    def publish_msg(  # type: ignore[override]  # what else there is, no widget gives
        self, msg_type: str, data: Any = None, **more: Any
    ) -> None:
        content = {"data": data, "comm_id": self.comm_id}
        self.session.send(self.socket, msg_type, content, buffers=more.get("buffers"))


def messages(ranks: int, first: int) -> Iterator[dict[str, Any]]:
    """Yield what each rank sends of the next half second, as it comes off the wire."""
    for rank in range(ranks):
        batch = steps_of(rank, ranks, round(RECORDS_S / STEP_S), first=first)
        yield batch.to_wire()


def frames_ms(ranks: int = 8, points: int = 10_000, seconds: int = 20) -> list[float]:
    """Return what a frame takes in milliseconds of processor time, a mean of each second's."""
    telemetry, info, known = training(ranks, points), cell_info(ranks), analysis_of(ranks, slow=0)
    batches = [list(messages(ranks, points + 1 + round(at * RECORDS_S / STEP_S)))
               for at in range(round(seconds / RECORDS_S))]  # fmt: skip
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        _SentComm.socket = socket
        socket.bind("tcp://127.0.0.1:*")
        plain, comm.create_comm = comm.create_comm, _SentComm
        try:
            from nbdist.client.board.live.widget import BoardWidget

            stream = PointStream(telemetry)
            stream.take()
            words = words_of(look(telemetry, info, known, histories=False), "")
            frame = frame_of(info.ranks, palette.theme_named("auto"), "overview")
            history = lambda: ({"words": words}, stream.whole())  # noqa: E731
            widget = BoardWidget("board", frame, history, lambda _: None)
        finally:
            comm.create_comm = plain
        took = [_second_ms(telemetry, stream, widget, batches, second) for second in range(seconds)]
        widget.close()
        return took


def _second_ms(
    telemetry: Telemetry, stream: PointStream, widget: Any, batches: list[Any], second: int
) -> float:
    frames, a_second = round(1 / PERIOD_S), round(1 / RECORDS_S)
    info, known = cell_info(len(batches[0])), analysis_of(len(batches[0]), slow=0)
    due = batches[second * a_second : (second + 1) * a_second]
    began = time.process_time()
    for frame in range(frames):
        for batch in due[frame // 3] if frame % 3 == 0 else ():
            telemetry.receive(Batch.from_wire(batch))
        if (points := stream.take()) is not None:
            widget.send_points("points", points)
        if frame * PERIOD_S % WORDS_S == 0:
            words = words_of(look(telemetry, info, known, histories=False), "1,200 [00:12]")
            widget.send({"kind": "words", "words": words})
    return (time.process_time() - began) * 1e3 / frames


def rows() -> list[Row]:
    """Return the row of the board; the noise is between every other second and the rest."""
    took = frames_ms()
    noise = apart(took[::2], took[1::2])
    what = "a frame of the board, 8 ranks x 10,000 points"
    median = statistics.median(took)
    return [Row(what, median, "ms", noise=noise, goal=GOAL_MS, goal_on="measured")]


if __name__ == "__main__":
    for n in (2, 8, 64):
        print(f"{n:3d} ranks: {statistics.median(frames_ms(n)):5.2f} ms a frame", flush=True)
