"""Where ranks meet when a cell calls `init_process_group`, which is taken as done.

A plain script's call returns when all ranks have come to it, and scripts rely on that: rank 0
downloads or writes before it, and the others read afterwards. So who calls it here waits for the
ranks of the cell until they have called it as often in this cell. A rank that has ended the cell
comes no more, and is not waited for. Of one that cannot come, because it waits for this rank, the
notebook has a proof (`client/faults/deadlock`), and says so by `go_on`.

Through the store: a fault frees who waits there, and an interrupt does. In a script that torchrun
starts nobody proves anything: none waits there.

Threads: `waiting`, `counts` and `go_on` on any; the rest on the main one.
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
    """Those of one cell: its number, its ranks, and how often it has called here."""

    cell: int = 0
    ranks: frozenset[int] = frozenset()
    count: int = 0
    since: float | None = None  # time.monotonic(); the main thread waits
    missing: frozenset[int] = field(default_factory=frozenset)
    left: int = 0  # the newest meeting that `go_on` has ended


class Meetings(Component):
    """The meetings of the cell that runs; in a script that torchrun starts there are none."""

    def __init__(self) -> None:
        self._now = _Meetings()

    def cell_began(self, start: CellStart) -> None:
        """Begin to count for the ranks of this cell."""
        self._now = _Meetings(start.number, frozenset(start.ranks))

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Let the others know that this rank comes no more.

        Of a failure they are not told here: it frees who waits, and they must not go on as if all
        were done that comes before.
        """
        place, ended, self._now = state.here.place(), self._now, _Meetings()
        if place is not None and len(ended.ranks) > 1 and cell.has_succeeded:
            with contextlib.suppress(DistError):  # without a store nobody waits there
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
                do="call it on all ranks, give what comes before it less to do, or a longer "
                "timeout=.",
            )
        if now.missing:
            print(
                f"init_process_group: rank {place.rank} goes on without {who}, which cannot come."
            )

    def go_on(self, number: int) -> None:
        """Wait no more at this cell's meeting of that number: who is missing cannot come."""
        if number == self._now.count:
            self._now.left = number

    def counts(self) -> dict[str, int]:
        """Return how often this cell has come here, beside what the tap counts of groups."""
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
    """One key a rank, written anew each time: the store must not grow with each cell."""
    return f"nbdist/{place.generation}/init/{rank}"


here = Meetings()
meet = here.meet
