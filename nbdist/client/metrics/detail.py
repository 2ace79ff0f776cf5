"""Keep on disk what thinning takes from the memory of long lines, so that zooming finds it.

A line's history hands over what it is about to thin, ten thousand points at a time; lines that are
never thinned cost nothing. All lines of a cell share one file of the private folder. It has no
name: it goes with the cell's telemetry, and with the kernel, however that ends.

Bounds: the file is a ring of `MOST_BYTES`, in which the newest blocks take the place of the oldest.
A value takes 4 bytes, float32 as pages draw it; steps of one length take none, others 8. At most
`MOST_WAITING` bytes wait for the disk: where it fails or is slower than that, nothing is kept, and
`between` says so.

Threads: `put` runs on the one that receives records, and only hands over. `nbdist-detail` writes,
and ends when nothing has come for `LINGER_S`. `between` may be called on any.
"""

import contextlib
import logging
import math
import os
import tempfile
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nbdist.client.cluster.folders import make_private
from nbdist.client.metrics import usage
from nbdist.shared.background import lower_thread

MOST_BYTES = 256 * 2**20  # 8 ranks x 8 lines x a million steps
MOST_WAITING = 64 * 2**20
LINGER_S = 2.0  # lines that are thinned at about the same time share a thread
NOT_KEPT = "the rest was not kept"
_BLOCK = 16_384  # points
_LEAST_BYTES = 1024  # that a block takes of the ring: it bounds how many there are

_log = logging.getLogger("nbdist.telemetry")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a line: its points, by step.

    `lost` says in words that there were more which are not kept, and why; empty where there were
    none. Up to the step `lost_until` any may be missing.
    """

    steps: "array[float]"
    values: "array[float]"
    lost: str = ""
    lost_until: float = -math.inf


@dataclass(slots=True)
class _Block:
    """Some neighbours of a line: steps `first` to `last`, each `every` after the one before.

    With None for `every` the steps are part of the content, before the values. `end` counts the
    line's points up to these. The content is in memory until it lies at `place`.
    """

    first: float
    last: float
    count: int
    every: float | None
    end: int
    size: int
    content: bytes | None
    place: int = 0

    def points(self, content: bytes) -> tuple["array[float]", "array[float]"]:
        """Return steps and values."""
        import numpy as np

        values = np.frombuffer(content, np.float32)[-self.count :].astype(np.float64)
        if self.every is None:
            steps = content[: 8 * self.count]
        else:
            steps = (self.first + self.every * np.arange(self.count)).tobytes()
        return array("d", steps), array("d", values.tobytes())


class _Kept:
    """The blocks of one line, oldest first, and up to which step some have been forgotten."""

    def __init__(self) -> None:
        self.blocks: deque[_Block] = deque()
        self.lost_until = -math.inf

    def forget_oldest(self) -> None:
        """Forget a block whose bytes are written over."""
        self.lost_until = max(self.lost_until, self.blocks.popleft().last)


class Detail:
    """The thinned points of one cell.

    Args:
        folder: The private folder, made where need be.
        most_bytes: How much of the disk they take.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._folder, self._most = folder, most_bytes
        self._changed = threading.Condition()  # held for no longer than lists are changed
        self._waiting: deque[tuple[_Kept, _Block]] = deque()
        self._waiting_bytes = 0
        self._is_writing = False
        self._written: deque[tuple[_Kept, _Block]] = deque()  # as they lie in the ring
        self._head = 0  # bytes ever given away, of which the last `most_bytes` are there
        self._file: int | None = None
        self._failure = ""

    def line(self) -> "DetailLine":
        """Return what keeps one line."""
        return DetailLine(self)

    def take(self, line: _Kept, block: _Block) -> None:
        """Keep a block of a line."""
        with self._changed:
            if self._failure:
                return
            line.blocks.append(block)
            self._waiting.append((line, block))
            self._waiting_bytes += block.size
            if self._waiting_bytes > MOST_WAITING:
                self._give_up("the disk is too slow")
            elif self._is_writing:
                self._changed.notify()
            else:
                self._begin_writing()

    def _begin_writing(self) -> None:
        self._is_writing = True
        try:
            threading.Thread(target=self._write, name="nbdist-detail", daemon=True).start()
        except RuntimeError as error:  # as many as the system allows: the training goes on
            self._give_up(str(error))

    def between(self, line: _Kept, low: float, high: float, count: int) -> Part:
        """Return a line's points from one step to another, of the first `count` that it took."""
        with self._changed:
            found = [
                (block, block.content)
                for block in line.blocks
                if block.first <= high and block.last >= low and block.end <= count
            ]
        try:
            read = [self._pick_up(block) if held is None else held for block, held in found]
        except OSError as error:
            self._give_up(error.strerror or str(error))
        with self._changed:
            if self._failure:
                return lost_part(f"{NOT_KEPT}: {self._failure}")
            oldest, lost_until = self._head - self._most, line.lost_until
            # A block that was written over meanwhile is not what it was.
            intact = [held is not None or block.place >= oldest for block, held in found]
        parts = [
            block.points(content)
            for (block, _), content, is_one in zip(found, read, intact, strict=True)
            if is_one
        ]
        lost = f"of the rest the newest {self._most >> 20} MiB are kept"
        points = _cut(parts, max(low, math.nextafter(lost_until, math.inf)), high)
        return Part(*points, lost if lost_until >= low else "", lost_until)

    @usage.counts
    def _write(self) -> None:
        lower_thread()
        while (due := self._next()) is not None:
            line, block, content, place = due
            try:
                self._put_down(content, place)
            except OSError as error:
                self._give_up(error.strerror or str(error))
                continue
            with self._changed:
                if not self._failure:
                    block.place, block.content = place, None
                    self._waiting_bytes -= block.size
                    self._written.append((line, block))

    def _next(self) -> tuple[_Kept, _Block, bytes, int] | None:
        """Return what is to be written, and where; None when nothing comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting, LINGER_S)
            if not self._waiting:
                self._is_writing = False
                return None
            line, block = self._waiting.popleft()
            assert block.content is not None
            place = self._head
            self._head += max(block.size, _LEAST_BYTES)
            while self._written and self._written[0][1].place < self._head - self._most:
                self._written.popleft()[0].forget_oldest()
            return line, block, block.content, place

    def _put_down(self, content: bytes, place: int) -> None:
        if self._file is None:
            make_private(self._folder)
            with tempfile.TemporaryFile(dir=self._folder) as file:
                self._file = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._file)
        for at, part in self._pieces(place, len(content)):
            piece = memoryview(content)[part]
            while piece:
                written = os.pwrite(self._file, piece, at)
                piece, at = piece[written:], at + written

    def _pick_up(self, block: _Block) -> bytes:
        assert self._file is not None
        pieces = self._pieces(block.place, block.size)
        found = [os.pread(self._file, part.stop - part.start, at) for at, part in pieces]
        content = b"".join(found)
        if len(content) < block.size:
            raise OSError("the file was cut off")
        return content

    def _pieces(self, place: int, size: int) -> list[tuple[int, slice]]:
        """Return where in the file some bytes lie: in two pieces where the ring ends in between."""
        at = place % self._most
        first = min(size, self._most - at)
        return [(at, slice(0, first)), (0, slice(first, size))]

    def _give_up(self, why: str) -> None:
        with self._changed:
            if self._failure:
                return
            self._failure = why
            _log.warning("Long lines are not kept in full: %s", why)
            for line, _ in (*self._waiting, *self._written):
                line.blocks.clear()
            self._waiting.clear()
            self._written.clear()
            if self._file is not None:
                # Not closed: another thread may be about to write, and the number soon be another
                # file's.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, 0)


class DetailLine:
    """What is kept of one line. `put` is one thread's, the rest any."""

    def __init__(self, detail: Detail) -> None:
        self._detail, self._kept = detail, _Kept()
        self._count = 0

    def put(self, steps: "array[float]", values: "array[float]") -> int:
        """Take points, by step; return how many it has taken in all."""
        for at in range(0, len(steps), _BLOCK):
            x, y = steps[at : at + _BLOCK], values[at : at + _BLOCK]
            self._count += len(x)
            every, content = _packed(x, y)
            block = _Block(x[0], x[-1], len(x), every, self._count, len(content), content)
            self._detail.take(self._kept, block)
        return self._count

    def between(self, low: float, high: float, count: int) -> Part:
        """Return the points from one step to another, of the first `count` that it took."""
        return self._detail.between(self._kept, low, high, count)


def lost_part(why: str) -> Part:
    """Return a part of which nothing is there any more."""
    return Part(array("d"), array("d"), why, math.inf)


def _packed(steps: "array[float]", values: "array[float]") -> tuple[float | None, bytes]:
    """Return the length of each step, None where they differ, and the bytes of all else."""
    import numpy as np  # here: a notebook that only starts does not wait for it

    n = len(steps)
    every = (steps[-1] - steps[0]) / max(1, n - 1)
    with np.errstate(over="ignore"):
        content = np.array(values).astype(np.float32).tobytes()
    if np.array_equal(steps[0] + every * np.arange(n), np.array(steps)):
        return every, content
    return None, steps.tobytes() + content


def _cut(
    blocks: "Sequence[tuple[array[float], array[float]]]", low: float, high: float
) -> "tuple[array[float], array[float]]":
    """Return the points of all blocks from one step to another, by step."""
    import numpy as np

    x = np.concatenate([np.empty(0), *(steps for steps, _ in blocks)])
    y = np.concatenate([np.empty(0), *(values for _, values in blocks)])
    if not np.all(x[:-1] <= x[1:]):  # some came late
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
    part = slice(np.searchsorted(x, low), np.searchsorted(x, high, side="right"))
    return array("d", x[part].tobytes()), array("d", y[part].tobytes())
