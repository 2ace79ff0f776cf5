"""Put the traces of all ranks beside each other, on one clock. Pure.

The form is Chrome's "Trace Event Format", which ui.perfetto.dev and chrome://tracing read. Each
rank gets process numbers of its own, `PIDS_A_RANK` apart: the first is its process, those behind it
its GPUs. Moments count in microseconds from the earliest beginning of a recording.

torch's moments are the rank's wall clock, `baseTimeNanoseconds` + `ts`. The rank tells how far
that was from its `perf_counter_ns`, on which offsets between ranks are known: ranks of one host
share that clock.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

PIDS_A_RANK = 100
_IDS_A_RANK = 2**32

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RankTrace:
    """One rank's trace as torch wrote it, and what the rank has reported beside.

    `title` says where the rank ran, "host-a, cpu". `offset_ns` is added to its `perf_counter_ns` to
    get the common clock.
    """

    rank: int
    title: str
    content: Mapping[str, Any]
    offset_ns: int = 0

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the rank says of its recording; see `engine/training/torch_profile.py`."""
        facts: Mapping[str, Any] = self.content["nbdist"]
        return facts

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that were recorded to their end."""
        return tuple(self.facts["steps"])

    @property
    def began_ns(self) -> int:
        """When the recording began, on the common clock."""
        return int(self.facts["began_ns"]) + self.offset_ns

    def shift_ns(self, origin_ns: int) -> int:
        """Return what brings its `ts` to the common clock, counted from `origin_ns` there."""
        base: int = self.content.get("baseTimeNanoseconds", 0)
        wall_minus_perf: int = self.facts["wall_minus_perf_ns"]
        return base - wall_minus_perf + self.offset_ns - origin_ns


def merged(trace: RankTrace, origin_ns: int, most: int) -> tuple[list[Event], int]:
    """Return one rank's events for the common trace, and how many were left out.

    Args:
        trace: The rank's.
        origin_ns: The moment 0, on the common clock.
        most: Most slices to return; the shortest ones are left out, and all arrows with them.
    """
    slices = [e for e in trace.content["traceEvents"] if _is_of_a_process(e) and e["ph"] == "X"]
    pids = _pids(trace, slices)
    kept = slices if len(slices) <= most else nlargest(most, slices, key=lambda e: e["dur"])
    arrows: list[Event] = []
    if len(kept) == len(slices):
        arrows = [e for e in trace.content["traceEvents"] if e["ph"] in "sf" and e["pid"] in pids]
    shift_us = trace.shift_ns(origin_ns) / 1000
    first_id = trace.rank * _IDS_A_RANK
    events = _names(trace, pids, {(e["pid"], e["tid"]) for e in kept})
    for event in (*kept, *arrows):
        moved = {**event, "pid": pids[event["pid"]], "ts": round(event["ts"] + shift_us, 3)}
        if "id" in event:
            moved["id"] = first_id + event["id"] % _IDS_A_RANK
        events.append(moved)
    return events, len(slices) - len(kept)


def _is_of_a_process(event: Event) -> bool:
    return isinstance(event["pid"], int)  # the profiler's own spans have names in their place


def _pids(trace: RankTrace, slices: Iterable[Event]) -> dict[int, int]:
    """Return the process numbers of the common trace by those in the rank's."""
    process = trace.facts["pid"]
    others = sorted({e["pid"] for e in slices} - {process})
    first = trace.rank * PIDS_A_RANK
    return {pid: first + i for i, pid in enumerate((process, *others)) if i < PIDS_A_RANK}


def _names(trace: RankTrace, pids: Mapping[int, int], used: set[tuple[int, Any]]) -> list[Event]:
    """Return what names and sorts the processes of one rank, and their threads."""
    events: list[Event] = []
    for pid, number in pids.items():
        where = f" ({trace.title})" if pid == trace.facts["pid"] else f": GPU {pid}"
        events += [
            about(number, "process_name", name=f"rank {trace.rank}{where}"),
            about(number, "process_sort_index", sort_index=number),
        ]
    for (pid, tid), name in _thread_names(trace).items():
        if (pid, tid) in used:
            main = pid == tid == trace.facts["pid"]
            events.append(about(pids[pid], "thread_name", tid, name="main" if main else name))
            events.append(about(pids[pid], "thread_sort_index", tid, sort_index=0 if main else 1))
    return events


def _thread_names(trace: RankTrace) -> dict[tuple[int, Any], str]:
    """Return the threads' names; of two for one thread, that which is its own."""
    names: dict[tuple[int, Any], str] = {}
    for event in trace.content["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "thread_name" and _is_of_a_process(event):
            place, name = (event["pid"], event["tid"]), event["args"]["name"]
            if place not in names or names[place].endswith("(python)"):
                names[place] = name
    return names


def about(pid: int, what: str, tid: Any = 0, **args: Any) -> Event:
    """Return an event that tells of a process or of a thread: its name, its place."""
    return {"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": what, "args": args}
