"""The time line: the last steps' collectives, a lane a rank, on one clock. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nbdist.client.metrics.analysis.match import Meetings
from nbdist.client.metrics.analysis.rows import Ints, Waits
from nbdist.client.metrics.analysis.values import Span, TimeLine, TimelineLane

STEPS = 3
MOST_SPANS = 6000  # in all lanes together
_MS = 1e-6  # in a nanosecond


@dataclass(frozen=True, slots=True)
class SampledSteps:
    """What was recorded of some steps. `families` are those of `MatchedCollectives`, `units` all.

    `steps` are begin and end of each as the first rank had them, where they are known.
    """

    meetings: Meetings
    families: Ints
    waits: Waits
    steps: Mapping[int, tuple[int, int]]
    units: Sequence[str]


def time_line(
    sampled: SampledSteps, ranks: Sequence[int], row_of: Mapping[int, int]
) -> TimeLine | None:
    """Return the time line of the last steps that were recorded; None of none.

    Args:
        sampled: What is known of them.
        ranks: Whose lanes.
        row_of: The row of a family in the table; of others nothing is shown.
    """
    steps = sorted(sampled.steps)[-STEPS:]
    until = np.iinfo(np.int64).max  # calls may be known of a step that has not ended
    return _line(sampled, ranks, row_of, steps, until)


def line_of(
    sampled: SampledSteps, ranks: Sequence[int], row_of: Mapping[int, int], step: int
) -> TimeLine | None:
    """Return the time line of one step, which was recorded; its arguments are `time_line`'s."""
    return _line(sampled, ranks, row_of, [step], step)


def _line(
    sampled: SampledSteps,
    ranks: Sequence[int],
    row_of: Mapping[int, int],
    steps: list[int],
    last: int,
) -> TimeLine | None:
    """Return the time line of `steps`, with the collectives up to the step `last`."""
    while len(steps) > 1 and _count(sampled, steps) > MOST_SPANS:
        steps = steps[1:]
    if not steps:
        return None
    begin = sampled.steps[steps[0]][0]
    span = steps[0], last
    lanes = tuple(_lane(sampled, rank, span, begin, len(ranks), row_of) for rank in ranks)
    moments = {step: sampled.steps[step] for step in steps}
    shown = tuple((step, (a - begin) * _MS, (b - begin) * _MS) for step, (a, b) in moments.items())
    until = [end for _, _, end in shown]
    until += [span.end_ms for lane in lanes for span in lane.spans]
    until += [blocked[1] for lane in lanes for blocked in lane.blocked]
    return TimeLine(max(until), shown, lanes)


def _count(sampled: SampledSteps, steps: Sequence[int]) -> int:
    return int(np.sum(sampled.meetings.rows.step >= steps[0]))


def _lane(
    sampled: SampledSteps,
    rank: int,
    steps: tuple[int, int],
    begin: int,
    n: int,
    row_of: Mapping[int, int],
) -> TimelineLane:
    first, last = steps
    meetings, waits = sampled.meetings, sampled.waits
    rows, of_row = meetings.rows, meetings.of_rows()
    chosen = np.flatnonzero((rows.rank == rank) & (rows.step >= first) & (rows.step <= last))
    chosen = chosen[np.argsort(rows.launch[chosen], kind="stable")][: MOST_SPANS // n]
    columns = (
        sampled.families[of_row[chosen]],
        rows.launch[chosen] - begin,
        rows.begin[chosen] - begin,
        rows.end[chosen] - begin,
        meetings.arrived[of_row[chosen]],
        rows.freed[chosen],
        rows.unit[chosen],
    )
    spans = tuple(
        Span(
            row_of[family],
            launch * _MS,
            begun * _MS,
            end * _MS,
            (arrived - begin) * _MS if arrived >= 0 else None,
            sampled.units[unit],
            (freed - begin) * _MS if freed else None,
        )
        for family, launch, begun, end, arrived, freed, unit in zip(
            *(c.tolist() for c in columns), strict=True
        )
        if family in row_of
    )
    is_mine = (waits.rank == rank) & (waits.step >= first) & (waits.step <= last)
    mine = np.flatnonzero(is_mine)[: MOST_SPANS // n]
    blocked = tuple(
        (a * _MS, b * _MS)
        for a, b in zip(
            (waits.begin[mine] - begin).tolist(), (waits.end[mine] - begin).tolist(), strict=True
        )
    )
    return TimelineLane(rank, spans, blocked)
