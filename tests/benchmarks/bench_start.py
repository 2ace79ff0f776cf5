"""From `%dist start` to the first all_reduce on all ranks, against one `import torch`."""

import statistics
import subprocess
import sys
import time

from tests.benchmarks.kernel import Kernel
from tests.benchmarks.table import Row, render

_FIRST = "%%distributed\nx = torch.ones(1); dist.all_reduce(x); assert x.item() == world_size"


def import_torch_s() -> float:
    """Return the seconds of one `import torch` in a fresh interpreter, start included."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - began


def _start_s(kernel: Kernel, command: str) -> float:
    began = time.perf_counter()
    for cell in (command, _FIRST):
        printed, error, _ = kernel.run(cell)
        if error:
            raise RuntimeError(f"{command}: {error} {printed}")
    return time.perf_counter() - began


def rows(rounds: int = 3) -> list[Row]:
    """Return first start at n=4 and n=16, a second start, and a restart."""
    times: dict[str, list[float]] = {"n=4": [], "n=16": [], "again": [], "restart": []}
    torch_s = []
    for _ in range(rounds):
        torch_s.append(import_torch_s())
        with Kernel() as kernel:
            kernel.run("%load_ext nbdist")
            times["n=4"].append(_start_s(kernel, "%dist start -n 4 --device cpu"))
            torch_s.append(import_torch_s())
            times["restart"].append(_start_s(kernel, "%dist restart"))
            kernel.run("%dist stop")
            times["again"].append(_start_s(kernel, "%dist start -n 4 --device cpu"))
        torch_s.append(import_torch_s())
        with Kernel() as kernel:
            kernel.run("%load_ext nbdist")
            times["n=16"].append(_start_s(kernel, "%dist start -n 16 --device cpu"))
    unit = statistics.median(torch_s)
    goals = {"n=4": 2.5, "n=16": 3.0, "again": 1.0, "restart": 1.0}
    names = {
        "n=4": "first start, n=4",
        "n=16": "first start, n=16",
        "again": "start again, n=4",
        "restart": "restart, n=4",
    }
    return [
        Row(
            names[key],
            statistics.median(times[key]) / unit,
            goals[key],
            "x",
            f"{statistics.median(times[key]):.2f} s against {unit:.2f} s for one import torch",
        )
        for key in goals
    ]


if __name__ == "__main__":
    print(render(rows()))
