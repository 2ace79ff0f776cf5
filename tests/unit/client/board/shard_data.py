"""A step of ZeRO-3 as a rank would measure it."""

from nbdist.client.metrics.analysis.values import (
    Analysis,
    CollectiveRow,
    Span,
    TimeLine,
    TimelineLane,
)

MB = 1_000_000


def in_shards(units: int, n: int, *, is_freed: bool = True) -> Analysis:
    """Return step 7, from 100 ms on: units of 1 MB, 10 ms each in forward and in backward."""
    rest = "", "float32"
    table = tuple(
        CollectiveRow(kind, "", tuple(range(n)), *rest, size, 1, 0, 0, 0, 1.0, None, None, None)
        for kind, size in (("all_gather", MB // n), ("reduce_scatter", MB), ("all_reduce", 8))
    )
    spans = [Span(2, 100.0, 100.0, 101.0, 100.0)]  # of no unit
    end = 100.0 + 20 * units
    for at in range(units):
        for number, begin in ((0, 100.0 + 10 * at), (1, end - 10 * (at + 1))):
            unit, freed = f"blocks.{at}", begin + 5
            still = freed if is_freed or not number else None
            spans.append(Span(0, begin, begin, begin + 2, begin, unit, still))
            if number:
                spans.append(Span(1, begin + 6, begin + 6, begin + 8, begin, unit))
    spans.sort(key=lambda span: span.launch_ms)
    line = TimeLine(end, ((6, 0.0, 100.0), (7, 100.0, end)), (TimelineLane(0, tuple(spans), ()),))
    return Analysis(table=table, line=line)
