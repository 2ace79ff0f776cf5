"""Text as people read it: numbers with their units, sets of ranks, tables, output without noise.

Sets of ranks are read as they are written: `all`, `0`, `0,2`, `1-3`. Noise is what C++ libraries
print that tells a person nothing. Pure.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence

from nbdist.shared.errors import UsageError

# torch's, of each connection from an address without a name: most clusters have no reverse DNS.
_NAMELESS = "The hostname of the client socket cannot be retrieved"
# A kernel's assertion, of each thread in which it fails: thousands of nearly equal lines.
_THREAD = r"block: \[[^\]\n]*\], thread: \[[^\]\n]*\] "
_ASSERTED = "Assertion `"
_ASSERTIONS = re.compile(
    rf"^(?P<first>(?P<where>[^\n]*: ){_THREAD}(?P<said>{_ASSERTED}[^\n]*` failed\.))"
    rf"(?:\n(?P=where){_THREAD}(?P=said))+$",
    re.MULTILINE,
)
_NAMELESS_LINE = re.compile(rf"^\[W[^\n]*\[c10d\] {_NAMELESS}[^\n]*\n?", re.MULTILINE)


MICROSECONDS = "µs"  # where people read it; in code and comments it is us


def figure(value: float) -> str:
    """Return `value` with about three digits: 0, 0.126, 12.3, 1,240, 3.1e-05, 6.2e+11."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    size = abs(value)
    if not 1e-3 <= size < 1e7:
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


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Return the ranks that `text` names, ascending and without repeats.

    Args:
        text: `all`, or ranks and ranges joined by commas, such as `0,2-3`.
        world_size: Number of ranks in the cluster; valid ranks are `0 .. world_size - 1`.

    Raises:
        UsageError: `text` is not of that form, or names a rank that does not exist.
    """
    if not isinstance(text, str):
        raise UsageError(f'Ranks are named by a text, "all", "0", "0,2" or "1-3", not {text!r}.')
    if text.strip() == "all":
        return tuple(range(world_size))
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"RANKS is all, 0, 0,2 or 1-3, not {text!r}.")
        low, high = int(first), int(last) if dash else int(first)
        if low > high:
            raise UsageError(f"The range {part.strip()!r} runs backwards; write {high}-{low}.")
        if high >= world_size:
            # Named before they are counted: a slip of the keyboard may name a million million.
            raise UsageError(
                f"There is no rank {high}: this cluster has {name_ranks(range(world_size))}."
            )
        chosen.update(range(low, high + 1))
    return tuple(sorted(chosen))


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in words, runs joined: `rank 2`, `ranks 0-3`, `ranks 0, 2-3`."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'' if len(ordered) == 1 else 's'} {', '.join(parts)}"


def begin_with_ranks(ranks: Iterable[int], *, be: bool = False) -> str:
    """Return the beginning of a sentence: `Ranks 0-3`, with `be` `Ranks 0-3 are`."""
    chosen = set(ranks)
    name = name_ranks(chosen)
    verb = "" if not be else " is" if len(chosen) == 1 else " are"
    return name[0].upper() + name[1:] + verb


def without_noise(text: str) -> str:
    """Return what a descriptor was written, without such lines; of equal assertions, one stays."""
    if _NAMELESS in text:
        text = _NAMELESS_LINE.sub("", text)
    return _ASSERTIONS.sub(_once, text) if _ASSERTED in text else text


def _once(found: re.Match[str]) -> str:
    more = found.group().count("\n")
    return f"{found['first']} (and so in {more:,} more thread{'' if more == 1 else 's'})"
