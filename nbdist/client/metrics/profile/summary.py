"""Sum up what a rank did in its recorded steps. Pure.

The main thread's time is divided among kinds, each moment by the innermost event that runs there:

- *communication*: an operator of torch.distributed; and whatever belongs to no operator while one
  is under way on another thread, as in DDP's wait at the end of backward;
- *data*: within a DataLoader's `next`; *optimizer*: within `step` or `zero_grad`;
- *compute*: any other operator;
- *other*: Python, and libraries that torch does not see.

An operator's *self* time is what it did not spend in operators that it called.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from nbdist.client.metrics.profile.traces import Event, RankTrace

KINDS = ("compute", "communication", "data", "optimizer", "other")
_COMMUNICATION = ("c10d::", "_c10d_functional::", "gloo:", "nccl:", "ncclDevKernel", "ncclKernel")
_DATA = ("enumerate(DataLoader)",)
_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
_STEP = "ProfilerStep#"

Interval = tuple[float, float]


@dataclass(slots=True)
class OpTotal:
    """What one operator took on one rank in all recorded steps; time in microseconds."""

    calls: int = 0
    self_us: float = 0.0


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank's recorded steps; milliseconds a step, or of all where no step was made.

    `by_kind` divides the main thread's time and sums to `step_ms`. `communication_ms` is when any
    collective was under way, beside computing too. `gpu` divides the GPU's time, where there is
    one: "compute" (kernels), "communication" (NCCL's alone) and "idle".
    """

    rank: int
    steps: tuple[int, ...]
    step_ms: float
    by_kind: Mapping[str, float]
    communication_ms: float
    gpu: Mapping[str, float] = field(default_factory=dict)
    ops: Mapping[str, OpTotal] = field(default_factory=dict)


def summarize(trace: RankTrace) -> RankSummary:
    """Return what this rank did."""
    pid = trace.facts["pid"]
    slices = [e for e in trace.content["traceEvents"] if e["ph"] == "X"]
    threads = _threads(slices, pid)
    windows = _windows(slices, trace.steps)
    count = max(1, len(trace.steps))
    under_way = _union(_interval(e) for e in slices if _is_communication(e) and e["pid"] == pid)
    kernels = [e for e in slices if e.get("cat") == "kernel"]
    if kernels:
        under_way = _union(_interval(e) for e in kernels if _is_communication(e))
    by_kind = _divide(threads.get(_main_thread(slices, threads), []), windows, under_way)
    return RankSummary(
        rank=trace.rank,
        steps=trace.steps,
        step_ms=_length(windows) / count / 1000,
        by_kind={kind: by_kind[kind] / count / 1000 for kind in KINDS},
        communication_ms=_common(under_way, windows) / count / 1000,
        gpu={k: v / count / 1000 for k, v in _gpu(kernels, windows).items()},
        ops=_operators([*threads.values(), *([e] for e in kernels)], windows),
    )


def _threads(slices: Iterable[Event], pid: int) -> dict[int, list[Event]]:
    """Return the events of each thread of the process, outer before inner, but for steps."""
    threads: defaultdict[int, list[Event]] = defaultdict(list)
    for event in slices:
        if event["pid"] == pid and not event["name"].startswith(_STEP):
            threads[event["tid"]].append(event)
    for events in threads.values():
        events.sort(key=lambda e: (e["ts"], -e["dur"]))
    return dict(threads)


def _main_thread(slices: Iterable[Event], threads: Mapping[int, Sequence[Event]]) -> int:
    for event in slices:
        if event["name"].startswith(_STEP):
            return int(event["tid"])
    return max(threads, key=lambda tid: len(threads[tid]), default=0)


def _windows(slices: Sequence[Event], steps: Sequence[int]) -> list[Interval]:
    """Return when the recorded steps ran; without steps, the whole."""
    wanted = {f"{_STEP}{step}" for step in steps}
    found = sorted(_interval(e) for e in slices if e["name"] in wanted)
    if found or not slices:
        return found
    return [(min(e["ts"] for e in slices), max(e["ts"] + e["dur"] for e in slices))]


def _divide(
    events: Sequence[Event], windows: list[Interval], under_way: list[Interval]
) -> dict[str, float]:
    """Return the time by kind within `windows`, in microseconds."""
    busy: defaultdict[str, list[Interval]] = defaultdict(list)
    for start, end, _, kind in _innermost(events):
        if kind != "other":
            busy[kind].append((start, end))
    divided = {kind: _common(_union(busy[kind]), windows) for kind in KINDS}
    rest = _without(windows, _union(i for intervals in busy.values() for i in intervals))
    waiting = _common(rest, under_way)
    divided["communication"] += waiting
    divided["other"] = _length(rest) - waiting
    return divided


def _innermost(events: Sequence[Event]) -> Iterator[tuple[float, float, Event, str]]:
    """Yield which event of one thread ran innermost, from when to when, and its kind."""
    stack: list[tuple[float, Event, str]] = []
    now = 0.0
    for event in events:
        start, end = _interval(event)
        while stack and stack[-1][0] <= start:
            ended, inner, kind = stack.pop()
            if ended > now:
                yield now, ended, inner, kind
                now = ended
        if stack and start > now:
            yield now, start, stack[-1][1], stack[-1][2]
        now = max(now, start)
        outer = stack[-1][2] if stack else "other"
        limit = stack[-1][0] if stack else end
        stack.append((min(end, limit), event, _kind(event, outer)))
    while stack:
        ended, inner, kind = stack.pop()
        if ended > now:
            yield now, ended, inner, kind
            now = ended


def _kind(event: Event, outer: str) -> str:
    name: str = event["name"]
    if _is_communication(event):
        return "communication"
    if outer in ("communication", "data", "optimizer"):
        return outer
    if name.startswith(_DATA):
        return "data"
    if name.startswith(_OPTIMIZER):
        return "optimizer"
    return "compute" if event.get("cat") == "cpu_op" else outer


def _is_communication(event: Event) -> bool:
    return bool(event["name"].startswith(_COMMUNICATION))


def _operators(
    threads: Iterable[Sequence[Event]], windows: Sequence[Interval]
) -> dict[str, OpTotal]:
    """Return calls and self time of each operator that began within `windows`."""
    starts = [start for start, _ in windows]
    totals: defaultdict[str, OpTotal] = defaultdict(OpTotal)

    def counts(event: Event) -> bool:
        at = bisect_right(starts, event["ts"]) - 1
        return at >= 0 and bool(event["ts"] < windows[at][1])

    for events in threads:
        for event in events:
            if counts(event):
                totals[event["name"]].calls += 1
        for start, end, event, _ in _innermost(events):
            if counts(event):
                totals[event["name"]].self_us += end - start
    return dict(totals)


def _gpu(kernels: Sequence[Event], windows: list[Interval]) -> dict[str, float]:
    if not kernels:
        return {}
    computing = _union(_interval(e) for e in kernels if not _is_communication(e))
    sending = _union(_interval(e) for e in kernels if _is_communication(e))
    compute = _common(computing, windows)
    alone = _common(_without(sending, computing), windows)
    return {
        "compute": compute,
        "communication": alone,
        "idle": _length(windows) - compute - alone,
    }


# -- intervals, in order and apart from each other


def _interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _both(some: Sequence[Interval], others: Sequence[Interval]) -> Iterator[Interval]:
    i = j = 0
    while i < len(some) and j < len(others):
        start, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if start < end:
            yield start, end
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1


def _common(some: Sequence[Interval], others: Sequence[Interval]) -> float:
    return _length(_both(some, others))


def _without(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return what of `some` lies in none of `others`."""
    far = float("inf")
    ends = [-far, *(moment for interval in others for moment in interval), far]
    gaps = [(a, b) for a, b in list(pairwise(ends))[::2] if a < b]
    return list(_both(some, gaps))
