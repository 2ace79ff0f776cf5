"""Lanes of the time line: which ranks have one, and where their collectives lie in it. Pure."""

from itertools import pairwise
from typing import TYPE_CHECKING

from nbdist.client.metrics.analysis.values import Span, TimelineLane

if TYPE_CHECKING:  # for its type alone: the scene loads numpy
    from nbdist.client.board.scene.scene import Scene

MOST_LANES = 12
MOST_TRACKS = 4  # bars of one rank above each other, where collectives overlap


def telling_lanes(scene: "Scene", most: int = MOST_LANES) -> list[TimelineLane]:
    """Return the lanes worth showing: of many, those who came last or waited most.

    Ranks of verdicts come first, then those who most often came last at a collective, then those
    who waited longest, then the lowest; shown in the order of their numbers.
    """
    line = scene.analysis.line
    if line is None:
        return []
    if len(line.lanes) <= most:
        return list(line.lanes)
    analysis = scene.analysis
    wanted = [verdict.rank for verdict in analysis.verdicts]
    late = {row.last[0]: row.last[1] for row in analysis.table if row.last is not None}
    wanted += sorted(late, key=lambda rank: -late[rank])
    waits = sorted(analysis.ranks, key=lambda rank: -rank.parts.get("waiting", 0.0))
    wanted += [rank.rank for rank in waits[: most // 2]]
    wanted += [lane.rank for lane in line.lanes]
    chosen = set(list(dict.fromkeys(wanted))[:most])
    return [lane for lane in line.lanes if lane.rank in chosen]


def tracks(lanes: list[TimelineLane]) -> list[list[int]]:
    """Return the track of each span in each lane: those that overlap lie above each other.

    Without an overlap there is one track. With few lines of the table each has its own, so that a
    bucket is found at the same height in all lanes; else a span takes the first that is free.
    """
    ordered = [sorted(lane.spans, key=lambda span: span.launch_ms) for lane in lanes]
    pairs = (pair for spans in ordered for pair in pairwise(spans))
    if not any(later.launch_ms < earlier.end_ms for earlier, later in pairs):
        return [[0] * len(lane.spans) for lane in lanes]
    rows = sorted({span.row for lane in lanes for span in lane.spans})
    if len(rows) <= MOST_TRACKS:
        return [[rows.index(span.row) for span in lane.spans] for lane in lanes]
    return [_packed(lane.spans) for lane in lanes]


def _packed(spans: tuple[Span, ...]) -> list[int]:
    """Return the first free track of each span; the one that is free soonest when none is."""
    ends: list[float] = []
    placed = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: spans[i].launch_ms):
        span = spans[index]
        free = [track for track, end in enumerate(ends) if end <= span.launch_ms]
        if free:
            track = free[0]
        elif len(ends) < MOST_TRACKS:
            ends.append(0.0)
            track = len(ends) - 1
        else:
            track = ends.index(min(ends))
        ends[track] = max(ends[track], span.end_ms)
        placed[index] = track
    return placed


def phases(span: Span) -> dict[str, tuple[float, float]]:
    """Return what a collective did when: "queueing", "waiting", "transferring"; those it did.

    Where the arrival of its last rank is not known, waiting is not separated from transferring.
    """
    arrived = span.begin_ms if span.arrived_ms is None else span.arrived_ms
    moved = min(max(span.begin_ms, arrived), span.end_ms)
    all_of_them = {
        "queueing": (span.launch_ms, span.begin_ms),
        "waiting": (span.begin_ms, moved),
        "transferring": (moved, span.end_ms),
    }
    return {name: (begin, end) for name, (begin, end) in all_of_them.items() if end > begin}
