"""Turn long, noisy series into what a few hundred pixels can show.

Pure functions on numpy arrays: `x` and `y` are 1-D float64 of one length, `x` rising; `y` may
hold nan and inf, for a loss does. R ranks, N points, C pixel columns, S steps in a column.
"""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Limits = tuple[float, float]

SPIKE = 4.0  # a peak beyond this many times the bulk is cut off and marked, else it hides all


def decimate(x: Floats, y: Floats, columns: int) -> tuple[Floats, Floats]:
    """Return at most about `4 * columns` points: the lowest and highest of each bucket.

    A spike one step long survives, which taking every k-th point would lose. Buckets hold a
    power of two of points, so that those of a growing series stay where they are.
    """
    n = len(y)
    if n <= 2 * columns:
        return x, y
    size = _bucket_size(n, columns)
    whole = n // size * size
    buckets = y[:whole].reshape(-1, size)
    finite = np.isfinite(buckets)
    low = np.where(finite, buckets, np.inf).argmin(axis=1)
    high = np.where(finite, buckets, -np.inf).argmax(axis=1)
    index = np.empty(2 * len(buckets) + n - whole, dtype=np.intp)
    start = np.arange(0, whole, size)
    index[0 : 2 * len(buckets) : 2] = np.minimum(low, high) + start
    index[1 : 2 * len(buckets) : 2] = np.maximum(low, high) + start
    index[2 * len(buckets) :] = np.arange(whole, n)
    return x[index], y[index]


def smooth(y: Floats, window: int) -> Floats:
    """Return the centred running mean over `window` points, fewer at the ends; nan of none."""
    if window <= 1 or len(y) < 3:
        return y
    finite = np.isfinite(y)
    running = np.zeros((2, len(y) + 1))
    np.cumsum(np.where(finite, y, 0.0), out=running[0, 1:])
    np.cumsum(finite, out=running[1, 1:])
    at = np.arange(len(y))
    # Of one length on both sides, also at the ends: else a slope would bend there.
    half = np.minimum(window // 2, np.minimum(at, len(y) - 1 - at))
    total, count = running.take(at + half + 1, axis=1) - running.take(at - half, axis=1)
    mean: Floats = np.divide(total, count, out=np.full(len(y), np.nan), where=count > 0)
    return mean


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
        bulk = float(np.percentile(everything, 97, method="lower"))
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


def band(lines: list[tuple[Floats, Floats]], columns: int) -> tuple[Floats, Floats]:
    """Return where many ranks lie together, by step.

    Args:
        lines: (x, y) a rank; x are whole numbers (steps).
        columns: Most columns to return.

    Returns:
        x of shape (C,), and (5, C): the lowest of all ranks, their 10th percentile, median and
        90th percentile, and the highest; nan where no rank has a finite value.
    """
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
    seen_RC = np.isfinite(cells_RCS).sum(axis=2)
    sums_RC = np.nansum(cells_RCS, axis=2)
    mean_RC = np.divide(sums_RC, seen_RC, out=np.full(sums_RC.shape, np.nan), where=seen_RC > 0)
    spread = np.full((5, width), np.nan)
    known = seen_RC.any(axis=0)
    spread[0, known] = np.nanmin(cells_RCS[:, known], axis=(0, 2))
    spread[1:4, known] = np.nanpercentile(mean_RC[:, known], (10, 50, 90), axis=0)
    spread[4, known] = np.nanmax(cells_RCS[:, known], axis=(0, 2))
    return first + np.arange(width) * size + (size - 1) / 2, spread


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


def _bucket_size(points: int, columns: int) -> int:
    return 1 << max(0, math.ceil(math.log2(points / columns)))
