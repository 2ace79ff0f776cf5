"""A rank raises, an interrupt, a killed rank: seconds until all are ready again, state kept.

Times are those of a person at the notebook: from the fault to the end of the cell, by when the
group stands again and dead ranks are replaced. A cell after each proves state and group.
"""

import statistics
import tempfile
from pathlib import Path

from tests.benchmarks import bench_reform
from tests.benchmarks.bench_start import import_torch_s
from tests.benchmarks.kernel import Kernel
from tests.benchmarks.table import Row, render
from tests.group.engines import cluster

GOAL_S = 1.0
REPLACED_S = 3.0  # beyond one `import torch`

_RAISE = "%%distributed\nif rank == 1: raise ValueError('planted')\ndist.all_reduce(torch.ones(1))"
_SPIN = "%%distributed\nwhile True: pass"
_WAIT = "%%distributed\nif rank == 1:\n    while True: pass\ndist.all_reduce(torch.ones(1))"
_CHECK = (
    "%%distributed\nassert kept == 42\n"
    "x = torch.ones(1); dist.all_reduce(x); assert x.item() == world_size"
)
# Once, rank 1 is killed in mid step; the loop tells how long after that the next step was made.
_TRAIN = """%%distributed --retry 1 --no-track
import json, os, pathlib, signal, time
model = torch.nn.Linear(64, 64)
nbdist.parallelize(model, "ddp")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
killed_at = pathlib.Path("FILE")
after_s = None
for step in range(40):
    model(torch.randn(8, 64)).sum().backward()
    if rank == 1 and step == 20 and not killed_at.exists():
        killed_at.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
    if after_s is None and killed_at.exists():
        after_s = time.monotonic() - float(killed_at.read_text())
"""
_AFTER = "%dist pull after_s\nimport json\nprint(json.dumps(after_s))"


def rows(n: int = 4, rounds: int = 5) -> list[Row]:
    """Return a row a fault."""
    return [*_reform_rows(), *_freed_rows(n, rounds), _killed_row(n, rounds)]


def _reform_rows() -> list[Row]:
    made = []
    for n, goal_ms in bench_reform.GOAL_MS.items():
        with cluster(n) as ranks:
            _, reformed = bench_reform.measure(ranks, rounds=10)
        made.append(_row(f"group re-formed, n={n}", reformed, "ms", goal_ms))
    return made


def _freed_rows(n: int, rounds: int) -> list[Row]:
    names = {
        _RAISE: "a rank raises, peers in a collective: all ready",
        _SPIN: "interrupt, ranks in Python",
        _WAIT: "interrupt, ranks in a collective",
    }
    times: dict[str, list[float]] = {cell: [] for cell in names}
    with Kernel() as kernel:
        kernel.run(f"%load_ext nbdist\n%dist start -n {n} --device cpu")
        kernel.run("%%distributed\nkept = 42")
        for _ in range(rounds):
            for cell in names:
                after = None if cell == _RAISE else 0.5
                _, error, seconds = kernel.run(cell, interrupt_after_s=after)
                assert error in ("RankError", "KeyboardInterrupt"), error
                times[cell].append(seconds)
                printed, error, _ = kernel.run(_CHECK)
                assert error is None, printed
    return [_row(f"{names[cell]}, n={n}", times[cell], "s", GOAL_S) for cell in names]


def _killed_row(n: int, rounds: int) -> Row:
    beyond_s = []
    with tempfile.TemporaryDirectory() as folder, Kernel() as kernel:
        kernel.run(f"%load_ext nbdist\n%dist start -n {n} --device cpu")
        kernel.run("%%distributed\nkept = 42")
        for number in range(rounds):
            torch_s = import_torch_s()
            file = Path(folder) / str(number)
            printed, error, _ = kernel.run(_TRAIN.replace("FILE", str(file)))
            assert error is None, (error, printed)
            beyond_s.append(max(kernel.ask(_AFTER)) - torch_s)
            printed, error, _ = kernel.run(_CHECK)
            assert error is None, printed
    what = f"killed rank in the loop again, n={n}: beyond one `import torch`"
    return _row(what, beyond_s, "s", REPLACED_S)


def _row(what: str, values: list[float], unit: str, goal: float) -> Row:
    longest = f"longest {max(values):.2g} {unit}"
    return Row(what, statistics.median(values), unit, None, longest, None, goal, "measured")


if __name__ == "__main__":
    print(render([[row] for row in rows()]))
