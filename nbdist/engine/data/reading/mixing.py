"""Mix the samples of many batches at once, where they are built the same way.

Cut batch by batch, each column of a batch is a slice of every lane: that costs more than reading.
While no lane ends and batches end where rounds do, each batch takes the same of every lane. Then
the lanes' samples of a *stretch* of batches are put side by side by one copy a lane and column, and
a batch is a view of what comes out.

Threads: the loop's, and its readers'.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbdist.engine.data.reading import columns
from nbdist.engine.data.reading.interleave import Interleave, Ints, Piece
from nbdist.engine.data.sources.source import Columns


@dataclass(frozen=True, slots=True)
class Stretch:
    """Batches that are built the same way, and what one rank takes of each lane.

    Attributes:
        batches: How many.
        rounds: Of each lane in a batch.
        lanes: Those that this rank's part touches: which samples of its rounds it takes of each
            (`range` in `rounds`), and where these lie over the whole stretch.
    """

    batches: int
    rounds: int
    lanes: tuple[tuple[range, tuple[Piece, ...]], ...]

    @property
    def rows(self) -> int:
        """This rank's samples of a batch."""
        return sum(len(taken) for taken, _ in self.lanes)

    @property
    def groups(self) -> set[int]:
        """Those that samples are taken from."""
        return {piece.group for _, pieces in self.lanes for piece in pieces}


def stretch(order: Interleave, start: int, ends: Sequence[int], part: range) -> Stretch | None:
    """Return the longest stretch that begins with a batch; None where the second one differs.

    Args:
        order: Of the epoch.
        start: Where the first batch begins.
        ends: Where it ends, and as many after it as may be made at once.
        part: This rank's positions of the first batch.
    """
    if len(ends) < 2:
        return None
    size = ends[0] - start
    lives, first = order.rounds_at(start)
    if not lives or first is None or size % len(lives) or not part:
        return None
    rounds = size // len(lives)
    count = min(len(ends), (order.rounds_left(lives) - first) // rounds)
    while count > 1 and ends[count - 1] != start + count * size:
        count -= 1  # only an epoch's last batch differs
    if count < 2:
        return None
    taken = []
    for nth, lane in enumerate(lives):
        offset = start + nth * rounds
        low, high = max(part.start - offset, 0), min(part.stop - offset, rounds)
        if low < high:
            pieces = order.of_lane(lane, first, first + count * rounds)
            taken.append((range(low, high), tuple(pieces)))
    return Stretch(count, rounds, tuple(taken))


def mixed(one: Stretch, cut: Callable[[Piece], Sequence[Columns]]) -> list[Columns]:
    """Return this rank's samples of each batch of a stretch.

    Args:
        one: The stretch.
        cut: Returns the samples of a piece, in parts.
    """
    lanes = [[part for piece in pieces for part in cut(piece)] for _, pieces in one.lanes]
    whole = {name: _mixed(one, [[p[name] for p in lane] for lane in lanes]) for name in lanes[0][0]}
    rows = one.rows
    return [columns.cut(whole, n * rows, (n + 1) * rows) for n in range(one.batches)]


def _mixed(one: Stretch, lanes: list[list[Any]]) -> Any:
    first = lanes[0][0]
    if not columns.are_alike([part for lane in lanes for part in lane]):
        return columns.take_rows(
            columns.join([part for lane in lanes for part in lane]), _order(one)
        )
    rows = one.rows
    out = np.empty((one.batches, rows, *first.shape[1:]), first.dtype)
    at = 0
    for (taken, _), parts in zip(one.lanes, lanes, strict=True):
        lane = parts[0] if len(parts) == 1 else np.concatenate(parts)
        by_batch = lane.reshape(one.batches, one.rounds, *first.shape[1:])
        out[:, at : at + len(taken)] = by_batch[:, taken.start : taken.stop]
        at += len(taken)
    return out.reshape(one.batches * rows, *first.shape[1:])


def _order(one: Stretch) -> Ints:
    """Return where each sample lies in the lanes, one after the other: int64[batches * rows]."""
    shape = len(one.lanes), one.batches, one.rounds
    lies = np.arange(shape[0] * shape[1] * shape[2], dtype=np.int64).reshape(shape)
    parts = [lies[n, :, taken.start : taken.stop] for n, (taken, _) in enumerate(one.lanes)]
    return np.concatenate(parts, axis=1).reshape(-1)
