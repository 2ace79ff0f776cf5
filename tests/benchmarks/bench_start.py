"""From `%dist start` to the first all_reduce on all ranks, against one `import torch`."""

import statistics
import subprocess
import sys
import time

from tests.benchmarks.kernel import Kernel
from tests.benchmarks.table import Row, apart, render

_FIRST = "%%distributed\nx = torch.ones(1); dist.all_reduce(x); assert x.item() == world_size"
GOALS = {"first start, n=4": 2.5, "first start, n=16": 3.0, "start again, n=4": 0.6}
RESTART_GOAL = 0.6


def import_torch_s() -> float:
    """Return the seconds of one `import torch` in a fresh interpreter, start included."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - began


def start_s(kernel: Kernel, command: str) -> float:
    """Return the seconds of `command` and of a first cell with an all_reduce."""
    began = time.perf_counter()
    for cell in (command, _FIRST):
        printed, error, _ = kernel.run(cell)
        if error:
            raise RuntimeError(f"{command}: {error} {printed}")
    return time.perf_counter() - began


def rows(rounds: int = 3, sizes: tuple[int, ...] = (4, 16)) -> list[Row]:
    """Return first starts, and at the smallest size a second start and a restart."""
    times: dict[str, list[float]] = {}
    torch_s: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for n in sizes:
            start, took = f"%dist start -n {n} --device cpu", {}
            torch_s[0].append(import_torch_s())
            with Kernel() as kernel:
                kernel.run("%load_ext nbdist")
                took["first start"] = start_s(kernel, start)
                if n == min(sizes):
                    took["restart"] = start_s(kernel, "%dist restart")
                    kernel.run("%dist stop")
                    took["start again"] = start_s(kernel, start)
            torch_s[1].append(import_torch_s())
            for what, seconds in took.items():
                times.setdefault(f"{what}, n={n}", []).append(seconds)
    goals = {**GOALS, f"restart, n={min(sizes)}": RESTART_GOAL}
    return [beside_torch(what, took, torch_s, goals.get(what)) for what, took in times.items()]


def beside_torch(
    what: str, took_s: list[float], torch_s: tuple[list[float], list[float]], goal: float | None
) -> Row:
    """Return the row of a start; `torch_s` was taken before and after each."""
    unit = statistics.median([*torch_s[0], *torch_s[1]])
    measured, noise = statistics.median(took_s), apart(*torch_s)
    return Row(what, measured, "s", unit, "one `import torch`", noise, goal)


if __name__ == "__main__":
    print(render([[row] for row in rows()]))
