"""A no-op `%%distributed` cell against a bare `DirectView.execute`, on the same engines."""

import sys

from tests.benchmarks.kernel import Kernel
from tests.benchmarks.table import Row, render

GOAL = 1.15

_MEASURE = """
import json, statistics, time, ipyparallel, nbdist
cluster = nbdist.current()._cluster
rc = ipyparallel.Client(str(cluster._folder.connection_file("client")))
view = rc[:]
shell = get_ipython()
def bare():
    view.execute("pass", silent=False, block=True)
def ours():
    shell.run_cell_magic("distributed", "", "pass")
for _ in range(5):
    bare(); ours()
times = {bare: [], ours: []}
for _ in range(ROUNDS):
    for call in times:
        began = time.perf_counter()
        call()
        times[call].append(time.perf_counter() - began)
rc.close()
print(json.dumps([1e3 * statistics.median(times[c]) for c in (bare, ours)]))
"""


def rows(sizes: tuple[int, ...] = (2, 4, 8, 16), rounds: int = 40) -> list[Row]:
    """Return a row for each number of ranks."""
    made = []
    for n in sizes:
        with Kernel() as kernel:
            kernel.run(f"%load_ext nbdist\n%dist start -n {n} --device cpu")
            bare_ms, ours_ms = kernel.ask(_MEASURE.replace("ROUNDS", str(rounds)))
        note = f"{ours_ms:.1f} ms against {bare_ms:.1f} ms"
        made.append(Row(f"no-op cell, n={n}", ours_ms / bare_ms, GOAL, "x", note))
    return made


if __name__ == "__main__":
    print(render(rows(tuple(map(int, sys.argv[1:])) or (2, 4, 8, 16))))
