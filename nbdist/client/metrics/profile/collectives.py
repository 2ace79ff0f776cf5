"""The collectives of the recorded steps as the tap has recorded them, as lanes of the common trace.

Torch's slices tell when a rank was in a collective. Here lie all ranks' beside each other, so each
slice is divided: *waiting for rank N*, the last to launch it, *queueing* for a thread of the
backend, and *transfer*; arrows lead from that rank's launch to the others.

Threads: `ProfiledCollectives.receive` runs on ipyparallel's IO thread; everything else on the main
one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.client.metrics.profile.chosen import ChosenSteps
from nbdist.client.metrics.profile.traces import PIDS_A_RANK, Event, about
from nbdist.shared.collectives import waits_for_all
from nbdist.shared.packed import Calls
from nbdist.shared.wire import Record

if TYPE_CHECKING:  # numpy takes a tenth of a second to import, and few cells are profiled
    from nbdist.client.metrics.analysis.match import Arrivals, Meetings
    from nbdist.client.metrics.analysis.rows import Family, FamilyIndex, Ints

MOST_NUMBERS = 2_000_000  # told of the steps; 400 000 calls
_FIRST_TID = 2**30  # no thread of an operating system
_FIRST_ID = 2**52  # of arrows; the ranks' own are less

Told = Mapping[int, Sequence[tuple[int, Calls]]]  # by rank: step, what was recorded of it


class ProfiledCollectives:
    """What ranks have reported of the collectives of some steps."""

    def __init__(self, steps: ChosenSteps) -> None:
        """Hear nothing yet."""
        self._steps = steps
        self._told: dict[int, list[tuple[int, Calls]]] = {}
        self._size = 0

    def receive(self, records: list[Record]) -> None:
        """Keep what tells of the chosen steps, and what all calls have in common."""
        for record in records:
            calls = record.detail
            if calls is None:
                continue
            if self._steps.first <= record.step <= self._steps.last and self._size < MOST_NUMBERS:
                self._size += len(calls.calls)
            elif calls.new:
                calls = Calls(calls.base_ns, calls.new, calls.calls[:0], calls.waits[:0])
            else:
                continue
            self._told.setdefault(record.rank, []).append((record.step, calls))

    def calls_by_rank(self) -> Told:
        """Return all of it."""
        return {rank: list(calls_by_rank) for rank, calls_by_rank in self._told.items()}


def lanes(calls_by_rank: Told, origin_ns: int, offset_ns: Callable[[int], int]) -> list[Event]:
    """Return slices and arrows of these collectives.

    Args:
        calls_by_rank: What ranks reported.
        origin_ns: The moment 0 of the common trace.
        offset_ns: What to add to a rank's moments for the common clock.
    """
    if not calls_by_rank:
        return []
    import numpy as np

    from nbdist.client.metrics.analysis.match import arrivals, match
    from nbdist.client.metrics.analysis.rows import CallRows, FamilyIndex, decode

    book = FamilyIndex()
    parts = []
    for rank, of_rank in calls_by_rank.items():
        for _, calls in of_rank:
            book.learn(rank, dict(calls.new))
        parts.append(decode(rank, of_rank, book, offset_ns(rank))[0])
    meetings = match(CallRows.concatenate(parts), book.sizes)
    is_symmetric = np.array([waits_for_all(family.kind) for family in book.families], bool)
    every = _calls(meetings, arrivals(meetings, is_symmetric), book, origin_ns)
    by_rank: defaultdict[int, list[_Call]] = defaultdict(list)
    for call in every:
        by_rank[call.rank].append(call)
    events = [event for rank, some in by_rank.items() for event in _of_rank(rank, some)]
    return [*events, *_arrows(every)]  # which know the lanes now


@dataclass(slots=True)
class _Call:
    """One rank's part of a collective; moments in microseconds from the origin.

    `came` is when `whom` had launched it, the rank that this one waited for; its own launch and -1
    where it waited for none. `last` is the last rank of all, -1 when not all are known.
    """

    rank: int
    family: "Family"
    meeting: int
    number: int
    launch: float
    begin: float
    end: float
    came: float
    whom: int
    last: int
    tid: int = 0


def _calls(
    meetings: "Meetings", waited: "Arrivals", book: "FamilyIndex", origin_ns: int
) -> list[_Call]:
    rows, meeting = meetings.rows, meetings.of_rows()

    def moments(column: "Ints") -> list[float]:
        return [(moment - origin_ns) / 1000 for moment in column.tolist()]

    columns = zip(
        rows.rank.tolist(),
        [book.families[family] for family in rows.family.tolist()],
        meeting.tolist(),
        rows.number.tolist(),
        moments(rows.launch),
        moments(rows.begin),
        moments(rows.end),
        moments(waited.moment),
        waited.whom.tolist(),
        meetings.last[meeting].tolist(),
        strict=True,
    )
    calls = [_Call(*values) for values in columns]
    for call in calls:
        call.came = min(max(call.came, call.launch), call.end) if call.whom >= 0 else call.launch
    return calls


def _of_rank(rank: int, calls: list[_Call]) -> Iterator[Event]:
    """Yield the slices of one rank; calls that overlap lie in lanes of their own."""
    ends: list[float] = []  # of each lane's last slice
    pid = rank * PIDS_A_RANK
    for call in sorted(calls, key=lambda call: (call.launch, -call.end)):
        lane = next((i for i, end in enumerate(ends) if end <= call.launch), len(ends))
        call.tid = _FIRST_TID + lane
        if lane == len(ends):
            ends.append(0.0)
            name = "collectives" if lane == 0 else f"collectives {lane + 1}"
            yield about(pid, "thread_name", call.tid, name=name)
            yield about(pid, "thread_sort_index", call.tid, sort_index=2 + lane)
        ends[lane] = call.end
        yield from _slices(call)


def _slices(call: _Call) -> Iterator[Event]:
    """Yield a collective's slice, and those that divide it."""
    family, moved = call.family, max(call.begin, call.came)
    facts = {"group": family.title, "bytes": family.bytes, "dtype": family.dtype}
    facts |= {"line": family.line, "number": call.number}
    yield _slice(call, family.kind, call.launch, call.end, facts)
    for name, start, end in (
        (f"waiting for rank {call.whom}", call.launch, call.came),
        ("queueing", call.came, moved),
        ("transfer", moved, call.end),
    ):
        if end > start:
            yield _slice(call, name, start, end, {})


def _slice(call: _Call, name: str, start: float, end: float, args: dict[str, object]) -> Event:
    start, end = round(start, 3), round(end, 3)
    times = {"ts": start, "dur": round(end - start, 3)}
    return {"ph": "X", "cat": "nbdist", "name": name, **_place(call), **times, "args": args}


def _place(call: _Call) -> dict[str, int]:
    return {"pid": call.rank * PIDS_A_RANK, "tid": call.tid}


def _arrows(calls: Sequence[_Call]) -> Iterator[Event]:
    """Yield the arrows from the rank that launched last to those that waited for it."""
    last = {(call.meeting, call.number): call for call in calls if call.rank == call.last}
    arrow_id = _FIRST_ID
    for call in calls:
        cause = last.get((call.meeting, call.number))
        if cause is None or call.whom != cause.rank:
            continue
        arrow_id += 1
        arrow = {"cat": "nbdist", "name": "came last", "id": arrow_id}
        yield {**arrow, "ph": "s", **_place(cause), "ts": round(cause.launch, 3)}
        yield {**arrow, "ph": "f", "bp": "e", **_place(call), "ts": round(call.came, 3)}
