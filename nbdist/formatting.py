"""Numbers as people read them, with their units; counted things; tables as lines of text."""

import math
from collections.abc import Callable, Sequence


def figure(value: float) -> str:
    """Return `value` with about three digits: 0, 0.126, 12.3, 1,240, 3.1e-05."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    size = abs(value)
    if 0 < size < 1e-3:
        return f"{value:.1e}"
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"


def milliseconds(value: float) -> str:
    """Return a time, microseconds the least: 0.380, 12.3, and 0 for less."""
    return figure(round(value, 3) if math.isfinite(value) else value)


def name_bytes(size: float) -> str:
    """Return bytes by powers of ten: `4 B`, `4.0 kB`, `32 kB`, `8.4 MB`."""
    if not math.isfinite(size):
        return "not finite"
    if size < 1000:
        return f"{size:.0f} B"
    units = iter(("kB", "MB", "GB", "TB"))
    while size >= 999.5 and (unit := next(units, None)):
        size, last = size / 1000, unit
    return f"{size:.1f} {last}" if size < 9.95 else f"{size:,.0f} {last}"


def name_rate(bytes_per_s: float, write: Callable[[float], str] = figure) -> str:
    """Return a bandwidth as nccl-tests do, by powers of ten: 4.12 GB/s, 310 MB/s."""
    for unit, worth in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_s >= worth:
            return f"{write(bytes_per_s / worth)} {unit}"
    return f"{write(bytes_per_s / 1e3)} kB/s"


def counted(number: int, word: str) -> str:
    """Return a number of things: `1 step`, `1,240 steps`."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def aligned(rows: Sequence[Sequence[str]], to_the_right: Sequence[bool] = ()) -> list[str]:
    """Return a line for each row, with columns below each other, two spaces apart.

    Args:
        rows: Cells of one line each, as many in every row.
        to_the_right: Which columns end on one line, as numbers do; without it none.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = to_the_right or [False] * len(widths)
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, sides, strict=True)
        ).rstrip()
        for row in rows
    ]
