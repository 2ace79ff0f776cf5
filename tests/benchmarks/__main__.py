"""`make bench`: every figure of the product, as a table of ratios, and what falls short.

Each figure is taken against a reference beside it on the same machine, in turns; medians.
Words after the command choose groups: `python -m tests.benchmarks cells start`.
"""

import os
import platform
import sys
import time
from collections.abc import Callable

from tests.benchmarks import (
    bench_board,
    bench_cells,
    bench_faults,
    bench_layout,
    bench_start,
    bench_step,
)
from tests.benchmarks import bench_tap as tap
from tests.benchmarks.table import Row, render
from tests.group.harness import run_ranks


def _tap_rows() -> list[Row]:
    (added,) = run_ranks(1, tap.measure, timeout_s=120)
    return [
        Row(f"{call} at {level}", us, tap.GOALS_US[level], "us")
        for call, levels in added.items()
        for level, us in levels.items()
        if level in ("counts", "full")
    ]


def _frame_rows() -> list[Row]:
    return [Row("a frame of the board", bench_board.frame_ms(), bench_board.GOAL_MS, "ms")]


GROUPS: dict[str, Callable[[], list[Row]]] = {
    "cells": bench_cells.rows,
    "start": bench_start.rows,
    "step": bench_step.rows,
    "tap": _tap_rows,
    "frame": _frame_rows,
    "faults": bench_faults.rows,
    "layouts": bench_layout.rows,
}


def main(chosen: list[str]) -> int:
    """Measure the chosen groups, all by default; print one table."""
    unknown = sorted(set(chosen) - set(GROUPS))
    if unknown:
        print(f"There is no group {unknown[0]!r}; they are {', '.join(GROUPS)}.")
        return 2
    rows = []
    for name in chosen or GROUPS:
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        rows += GROUPS[name]()
    when = time.strftime("%Y-%m-%d")
    print(
        f"{when}, {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    )
    print(render(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
