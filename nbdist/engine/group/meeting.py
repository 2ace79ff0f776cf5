"""Let ranks meet when a cell calls `init_process_group`, which does nothing else.

A plain script's call returns when all ranks have come to it, and scripts rely on that: rank 0
downloads or writes before it, and the others read afterwards. So a call of it here waits for the
ranks of the cell until they have called it as often in this cell. A rank that has ended the cell
no longer comes, and is not waited for. Of one that cannot come, because it waits for this rank, the
notebook has a proof (`client/faults/deadlock`), and says so by `end_wait`.

Through the store: a fault or an interrupt frees the waiting ranks. In a script that torchrun
starts there is no such proof: no rank waits.

Threads: `waiting`, `counts` and `end_wait` on any; the rest on the main one.
"""

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import DistError

from nbdist.engine.component import Component, EndedCell
from nbdist.engine.group import state
from nbdist.engine.group.state import GroupState
from nbdist.engine.kernel import location
from nbdist.engine.tap.in_flight import Waiting
from nbdist.shared.errors import ClusterError
from nbdist.shared.text import name_ranks
from nbdist.shared.wire import CellStart

KIND = "init_process_group"  # as a wait's kind and group; `client/faults/rank_state.MEETING`
_ENDED = "ended"


@dataclass
class _Meetings:
    """The meetings of one cell: its number, its ranks, and how often it has called."""

    cell: int = 0
    ranks: frozenset[int] = frozenset()
    count: int = 0
    since: float | None = None  # time.monotonic(); the main thread waits
    missing: frozenset[int] = field(default_factory=frozenset)
    left: int = 0  # the newest meeting that `end_wait` has ended


class Meetings(Component):
    """The meetings of the cell that runs; in a script that torchrun starts there are none."""

    def __init__(self) -> None:
        self._now = _Meetings()

    def cell_began(self, start: CellStart) -> None:
        """Begin to count for the ranks of this cell."""
        self._now = _Meetings(start.number, frozenset(start.ranks))

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Let the others know that this rank no longer comes.

        Not after a failure: that frees the waiting ranks, which must not continue as if everything
        before were done.
        """
        place, ended, self._now = state.here.place(), self._now, _Meetings()
        if place is not None and len(ended.ranks) > 1 and cell.has_succeeded:
            with contextlib.suppress(DistError):  # without a store no rank waits there
                _write(place, ended.cell, _ENDED)
        return ()

    def meet(self, place: GroupState, limit: timedelta | None) -> None:
        """Wait for the other ranks of the cell.

        Args:
            place: This rank's.
            limit: The longest wait; by default the group's timeout.

        Raises:
            ClusterError: A rank neither came in time nor ended the cell.
            ReleasedError: `group.abort` was called meanwhile.
        """
        now = self._now
        if place.rank not in now.ranks:
            return  # no cell runs
        now.count = number = now.count + 1
        _write(place, now.cell, str(number))
        now.missing = now.ranks - {place.rank}
        now.since = time.monotonic()
        limit = limit or timedelta(seconds=place.timeout_s)
        try:
            has_met = place.store.wait_until(lambda: _is_over(place, now), limit)
        finally:
            now.since = None
        who = name_ranks(now.missing)
        if not has_met:
            raise ClusterError(
                f"{who} did not come to init_process_group.",
                why=f"rank {place.rank} has waited {limit.total_seconds():g} s there: it returns "
                "when all ranks of the cell have called it.",
                do="call it on all ranks, do less before it, or a longer timeout=.",
            )
        if now.missing:
            print(
                f"init_process_group: rank {place.rank} continues without {who}, which cannot come."
            )

    def end_wait(self, number: int) -> None:
        """End the wait at this cell's meeting of that number: the missing ranks cannot come."""
        if number == self._now.count:
            self._now.left = number

    def counts(self) -> dict[str, int]:
        """Return how often this cell has come here, as the tap counts collectives of groups."""
        return {KIND: self._now.count}

    def waiting(self) -> Waiting | None:
        """Return the main thread's wait here."""
        now = self._now
        if (since := now.since) is None:
            return None
        cell = location.here.main_thread()
        return Waiting(
            *(KIND, KIND, now.count, 0, time.monotonic() - since),
            None if cell is None else cell["file_line"],
            ranks=tuple(sorted(now.ranks)),
        )


def _is_over(place: GroupState, here: _Meetings) -> bool:
    here.missing = frozenset(r for r in here.missing if not _has_come(place, here, r))
    return not here.missing or here.left >= here.count


def _has_come(place: GroupState, here: _Meetings, rank: int) -> bool:
    key = _key(place, rank)
    if not place.client.check([key]):
        return False
    cell, word = bytes(place.client.get(key)).decode().split()
    return int(cell) == here.cell and (word == _ENDED or int(word) >= here.count)


def _write(place: GroupState, cell: int, word: str) -> None:
    place.client.set(_key(place, place.rank), f"{cell} {word}")


def _key(place: GroupState, rank: int) -> str:
    """Return a rank's key, always the same: the store must not grow with each cell."""
    return f"nbdist/{place.generation}/init/{rank}"


here = Meetings()
meet = here.meet
