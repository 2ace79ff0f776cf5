"""Fit latency and bandwidth to measured messages. Pure.

The model is that of Hockney (1994): a message of n bytes takes latency + n / bandwidth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Final

_LONG: Final = 4  # latencies: what takes longer tells of the bandwidth


@dataclass(frozen=True, slots=True)
class Fit:
    """A line through messages of several sizes.

    Attributes:
        latency_s: Of a message without content.
        bandwidth: Bytes a second of what a long message has more than a shorter one.
        off: How far messages are from the line, as a share of the line's time: the median.
        worst: The farthest of them.
        worst_at: Its bytes.
    """

    latency_s: float
    bandwidth: float
    off: float = 0.0
    worst: float = 0.0
    worst_at: int = 0

    def time_s(self, nbytes: float) -> float:
        """Return the seconds of a message."""
        return self.latency_s + nbytes / self.bandwidth


def fit(points: Sequence[tuple[int, float]]) -> Fit:
    """Return the line through (bytes, seconds) of messages, two sizes or more.

    The latency is the median time of the shortest messages. The bandwidth is the median slope
    between long ones: so neither the latency, nor the burst that a limited link lets through, nor
    a message that something else made late counts as bandwidth.

    Raises:
        ValueError: There is one size only.
    """
    sizes = sorted({size for size, _ in points})
    if len(sizes) < 2:
        raise ValueError("a line needs messages of two sizes")
    latency_s = median(seconds for size, seconds in points if size == sizes[0])
    long = [point for point in points if point[1] > _LONG * latency_s and point[0] > sizes[0]]
    if len({size for size, _ in long}) < 2:
        long = [point for point in points if point[0] in sizes[-2:]]
    bandwidth = 1 / max(_slope(long), 1e-15)
    latency_s = max(latency_s - sizes[0] / bandwidth, 0.0)
    line = Fit(latency_s, bandwidth)
    off = [(abs(seconds / line.time_s(size) - 1), size) for size, seconds in points]
    return Fit(latency_s, bandwidth, median(share for share, _ in off), *max(off))


def _slope(points: Sequence[tuple[int, float]]) -> float:
    """Return seconds a byte: the median slope between two points (Theil 1950, Sen 1968)."""
    return median((s - t) / (n - m) for (n, s), (m, t) in combinations(points, 2) if n != m)
