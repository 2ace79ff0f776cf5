"""64 ranks on one machine: the no-op cell, the first start, and `%dist stop`."""

import statistics

from tests.benchmarks import bench_cells
from tests.benchmarks.bench_start import beside_torch, import_torch_s, start_s
from tests.benchmarks.kernel import Kernel
from tests.benchmarks.table import Row, render

RANKS = 64
START_GOAL = 8.0
STOP_GOAL_S = 5.0


def rows(rounds: int = 2) -> list[Row]:
    """Return the rows of cells, start and stop."""
    started, stopped = [], []
    torch_s: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        torch_s[0].append(import_torch_s())
        with Kernel() as kernel:
            kernel.run("%load_ext nbdist")
            started.append(start_s(kernel, f"%dist start -n {RANKS} --device cpu"))
            *_, seconds = kernel.run("%dist stop")
            stopped.append(seconds)
        torch_s[1].append(import_torch_s())
    start = beside_torch(f"first start, n={RANKS}", started, torch_s, START_GOAL)
    median_s = statistics.median(stopped)
    stop = Row(f"stop, n={RANKS}", median_s, "s", goal=STOP_GOAL_S, goal_on="measured")
    return [*bench_cells.rows((RANKS,), rounds=15), start, stop]


if __name__ == "__main__":
    print(render([[row] for row in rows()]))
