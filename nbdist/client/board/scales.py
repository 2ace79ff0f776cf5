"""Turn long, noisy series into what a few hundred pixels can show.

Pure functions on numpy arrays: `x` and `y` are 1-D float64 of one length, `x` rising; `y` may
hold nan and inf, for a loss does. R ranks, N points, C pixel columns, S steps in a column.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Limits = tuple[float, float]

GROWTH = 1.25  # an axis that must grow grows by a quarter: redrawing axes is the dear part
SPIKE = 4.0  # a peak beyond this many times the bulk is cut off and marked, else it hides all


def decimate(x: Floats, y: Floats, columns: int) -> tuple[Floats, Floats]:
    """Return at most about `4 * columns` points: the lowest and highest of each bucket.

    A spike one step long survives, which taking every k-th point would lose. Buckets hold a
    power of two of points, so that a growing series does not shimmer from frame to frame.
    """
    n = len(y)
    if n <= 2 * columns:
        return x, y
    size = _bucket_size(n, columns)
    whole = n // size * size
    buckets = y[:whole].reshape(-1, size)
    finite = np.isfinite(buckets)
    if finite.all():  # as most are; this runs for every line of every frame
        low, high = buckets.argmin(axis=1), buckets.argmax(axis=1)
    else:
        low = np.where(finite, buckets, np.inf).argmin(axis=1)
        high = np.where(finite, buckets, -np.inf).argmax(axis=1)
    index = np.empty(2 * len(buckets) + n - whole, dtype=np.intp)
    start = np.arange(0, whole, size)
    index[0 : 2 * len(buckets) : 2] = np.minimum(low, high) + start
    index[1 : 2 * len(buckets) : 2] = np.maximum(low, high) + start
    index[2 * len(buckets) :] = np.arange(whole, n)
    return x[index], y[index]


def smooth(y: Floats, window: int) -> Floats:
    """Return the centred running mean over `window` points, nan where none is finite."""
    if window <= 1 or len(y) < 3:
        return y
    finite = np.isfinite(y)
    running = np.zeros((2, len(y) + 1))
    np.cumsum(np.where(finite, y, 0.0), out=running[0, 1:])
    np.cumsum(finite, out=running[1, 1:])
    left, right = _windows(len(y), window)
    total, count = running.take(right, axis=1) - running.take(left, axis=1)
    mean: Floats = np.divide(total, count, out=np.full(len(y), np.nan), where=count > 0)
    return mean


@lru_cache(maxsize=8)
def _windows(points: int, window: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return where the window around each point begins and ends."""
    at = np.arange(points)
    return np.maximum(at - window // 2, 0), np.minimum(at + window // 2 + 1, points)


def smoothing_window(points: int) -> int:
    """Return how many points a running mean takes: 1 (no smoothing) for a short series."""
    return 1 if points < 40 else max(3, points // 30)


def bulk_limits(values: list[Floats], include: float | None = None) -> Limits | None:
    """Return the range worth showing of all `values`: whole, or without rare far spikes.

    The first step of a training sets up connections and takes a hundred times as long as
    the rest; a linear axis that holds it shows nothing else.

    Args:
        values: One array a line.
        include: A value that must be in the range, such as 0 for times.

    Returns:
        (low, high) with low < high; None when nothing is finite.
    """
    if not values:
        return None
    everything = np.concatenate(values)
    everything = everything[np.isfinite(everything)]
    if not len(everything):
        return None
    low, high = float(everything.min()), float(everything.max())
    if len(everything) >= 20:
        # partition, not percentile: this runs for every frame.
        at = int(0.97 * (len(everything) - 1))
        bulk = float(np.partition(everything, at)[at])
        if high - low > SPIKE * (bulk - low) > 0:
            high = low + 1.6 * (bulk - low)
    if include is not None:
        low, high = min(low, include), max(high, include)
    if not high > low:
        if low == include:
            return low, low + 1.0
        pad = abs(high) * 0.1 or 1.0
        return low - pad, high + pad
    return low, high


def padded(limits: Limits, floor: float | None = None) -> Limits:
    """Return `limits` with 6 % of air on both sides, none below `floor` where it is the end."""
    low, high = limits
    air = 0.06 * (high - low)
    return (low if floor is not None and low == floor else low - air), high + air


def grown(shown: Limits | None, needed: Limits) -> Limits:
    """Return the limits to show: as they are while they serve, with a quarter of room if not.

    They serve while all that is needed is inside and it fills at least 40 % of the height.
    """
    low, high = needed
    if shown is None or high - low < 0.4 * (shown[1] - shown[0]):
        return needed
    was_low, was_high = shown
    room = (GROWTH - 1.0) * (high - low)
    below = low - room if low < 0 else max(0.0, low - room)  # no loss will fall below zero
    return was_low if was_low <= low else below, was_high if was_high >= high else high + room


def band(lines: list[tuple[Floats, Floats]], columns: int) -> tuple[Floats, Floats]:
    """Return where many ranks lie together, by step.

    Args:
        lines: (x, y) a rank; x are whole numbers (steps).
        columns: Most columns to return.

    Returns:
        x of shape (C,), and (5, C): the lowest of all ranks, their 10th percentile, median and
        90th percentile, and the highest; nan where no rank has a finite value.
    """
    x_C, cells_RCS = _cells(lines, columns)
    seen_RC = np.isfinite(cells_RCS).sum(axis=2)
    sums_RC = np.where(np.isfinite(cells_RCS), cells_RCS, 0.0).sum(axis=2)
    mean_RC = np.divide(sums_RC, seen_RC, out=np.full(sums_RC.shape, np.nan), where=seen_RC > 0)
    low_C = np.fmin.reduce(np.fmin.reduce(cells_RCS, axis=2))
    high_C = np.fmax.reduce(np.fmax.reduce(cells_RCS, axis=2))
    return x_C, np.stack([low_C, *_percentiles(mean_RC, (0.1, 0.5, 0.9)), high_C])


def extent(lines: list[tuple[Floats, Floats]], columns: int) -> tuple[Floats, Floats]:
    """Return what `band` does, of the lowest and the highest alone (2, C): a third of its time."""
    x_C, cells_RCS = _cells(lines, columns)
    ends = np.fmin.reduce(cells_RCS), np.fmax.reduce(cells_RCS)
    return x_C, np.stack([np.fmin.reduce(ends[0], axis=1), np.fmax.reduce(ends[1], axis=1)])


def _cells(lines: list[tuple[Floats, Floats]], columns: int) -> tuple[Floats, Floats]:
    """Return the middle steps of columns, and what is finite in them by rank, the rest nan."""
    first = min(x[0] for x, _ in lines)
    last = max(x[-1] for x, _ in lines)
    length = int(last - first) + 1
    size = _bucket_size(length, columns) if length > columns else 1
    width = math.ceil(length / size)
    dense_RN = np.full((len(lines), width * size), np.nan)
    for row, (x, y) in enumerate(lines):
        dense_RN[row, (x - first).astype(np.intp)] = y
    dense_RN[np.isinf(dense_RN)] = np.nan
    cells_RCS = dense_RN.reshape(len(lines), width, size)
    x_C = first + np.arange(width) * size + (size - 1) / 2
    return x_C, cells_RCS


def mean_over_ranks(lines: list[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """Return the steps that any rank has made, and the mean of the finite values there.

    nan where no rank has one. Of two values of a rank at one step the last counts.

    Args:
        lines: (x, y) a rank; x are whole numbers (steps).
    """
    first, last = min(x[0] for x, _ in lines), max(x[-1] for x, _ in lines)
    dense_RN = np.full((len(lines), int(last - first) + 1), np.nan)
    for row, (x, y) in enumerate(lines):
        dense_RN[row, (x - first).astype(np.intp)] = y
    finite_RN = np.isfinite(dense_RN)
    counts = finite_RN.sum(axis=0)
    sums = np.where(finite_RN, dense_RN, 0.0).sum(axis=0)
    mean = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    seen = finite_RN.any(axis=0)
    return first + np.flatnonzero(seen), mean[seen]


def _percentiles(y_RC: Floats, shares: tuple[float, ...]) -> list[Floats]:
    """Return percentiles over ranks, ignoring nan: np.nanpercentile takes 30 times as long."""
    ordered = np.sort(y_RC, axis=0)  # nan sorts last
    last = np.maximum(np.isfinite(ordered).sum(axis=0) - 1, 0)
    columns = np.arange(y_RC.shape[1])
    found = []
    for share in shares:
        at = share * last
        below, above = np.floor(at).astype(np.intp), np.ceil(at).astype(np.intp)
        part = at - below
        found.append((1 - part) * ordered[below, columns] + part * ordered[above, columns])
    return found


def _bucket_size(points: int, columns: int) -> int:
    return 1 << max(0, math.ceil(math.log2(points / columns)))
