"""A no-op `%%distributed` cell against a bare `DirectView.execute` and `%%px`, same engines."""

import statistics
import sys

from tests.benchmarks.kernel import Kernel
from tests.benchmarks.table import Row, apart, render

GOAL = 1.05
PX_GOAL = 1.0
SIZES = (2, 4, 8, 16)

MEASURE = """
import json, random, time, ipyparallel, nbdist
cluster = nbdist.current()._cluster
rc = ipyparallel.Client(str(cluster._folder.connection_file("client")))
rc.activate()
view = rc[:]
shell = get_ipython()
def bare():
    view.execute("pass", silent=False, block=True)
def px():
    shell.run_cell_magic("px", "--block", "pass")
calls = {
    "bare": bare,
    "ours": lambda: shell.run_cell_magic("distributed", "", "pass"),
    "bare again": bare,
    "px": px,
    "px again": px,
}
times = {name: [] for name in calls}
shuffled = random.Random(0)
for number in range(5 + ROUNDS):
    # What a call leaves to do falls on the next one: no call is always after the same one.
    for name in shuffled.sample(list(calls), len(calls)):
        began = time.perf_counter()
        calls[name]()
        if number >= 5:
            times[name].append(1e3 * (time.perf_counter() - began))
rc.close()
print(json.dumps(times))
"""


def rows(sizes: tuple[int, ...] = SIZES, rounds: int = 40) -> list[Row]:
    """Return two rows for each number of ranks."""
    made = []
    for n in sizes:
        with Kernel() as kernel:
            kernel.run(f"%load_ext nbdist\n%dist start -n {n} --device cpu")
            made += compared(
                f"no-op cell, n={n}", kernel.ask(MEASURE.replace("ROUNDS", str(rounds)))
            )
    return made


def compared(what: str, times_ms: dict[str, list[float]]) -> list[Row]:
    """Return two rows of what `MEASURE` prints, with 40 rounds or so for its `ROUNDS`."""
    measured = statistics.median(times_ms["ours"])

    def row(title: str, name: str, beside: str, goal: float) -> Row:
        one, again = times_ms[name], times_ms[f"{name} again"]
        reference = statistics.median(one + again)
        return Row(title, measured, "ms", reference, beside, apart(one, again), goal)

    return [
        row(what, "bare", "bare `DirectView.execute`", GOAL),
        row(f"{what}, beside ipyparallel", "px", "`%%px`", PX_GOAL),
    ]


if __name__ == "__main__":
    print(render([[row] for row in rows(tuple(map(int, sys.argv[1:])) or SIZES)]))
