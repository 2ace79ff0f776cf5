"""A no-op cell against those of other libraries for notebooks, where they are installed.

They are no requirement of nbdist. Each runs in a kernel of its own; they take turns of a few cells.
"""

import importlib.util
import statistics
import sys

from tests.benchmarks.kernel import Kernel
from tests.benchmarks.table import Row, apart, render

RANKS = 4
GOAL = 1.0

# It starts its ranks as `python`. Its mode would send them the cell that measures.
_NBDISTRIBUTED = """
import os, sys
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
%load_ext nbdistributed
%dist_init --num-processes RANKS
%dist_mode -d
"""
# Its group of kernels, without the server and the proxy that stand before it.
_JUPYTER_DISTRIBUTED = """
from jupyter_distributed.kernel_group import DistributedKernelGroup
group = DistributedKernelGroup(RANKS)
await group.start()
"""
# To each the name to import, what starts RANKS ranks, and what runs a no-op cell on all of them.
LIBRARIES = {
    "nbdistributed": (
        _NBDISTRIBUTED,
        "get_ipython().run_cell_magic('distributed', '', 'pass')",
    ),
    "jupyter_distributed": (
        _JUPYTER_DISTRIBUTED,
        "await group.execute('pass')",
    ),
}
_OURS = (
    "%load_ext nbdist\n%dist start -n RANKS --device cpu",
    "get_ipython().run_cell_magic('distributed', '', 'pass')",
)
_MEASURE = """
import io, json, sys, time
times, shown = [], sys.stdout
for _ in range(CELLS):
    began = time.perf_counter()
    sys.stdout = io.StringIO()
    try:
        CALL
    finally:
        sys.stdout = shown
    times.append(1e3 * (time.perf_counter() - began))
print(json.dumps(times))
"""


def rows(turns: int = 4, cells: int = 10) -> list[Row]:
    """Return a row for each library that can be imported; says which cannot."""
    found = [name for name in LIBRARIES if importlib.util.find_spec(name)]
    if lacking := sorted(LIBRARIES.keys() - set(found)):
        print(f"  not installed: {', '.join(lacking)}", file=sys.stderr)
    return [_row(name, turns, cells) for name in found]


def _row(name: str, turns: int, cells: int) -> Row:
    with Kernel() as our_kernel, Kernel() as their_kernel:
        ask = {}
        for kernel, (start, call) in ((our_kernel, _OURS), (their_kernel, LIBRARIES[name])):
            printed, error, _ = kernel.run(start.replace("RANKS", str(RANKS)))
            if error:
                raise RuntimeError(f"{name}: {error} {printed}")
            ask[kernel] = _MEASURE.replace("CELLS", str(cells)).replace("CALL", call)
            kernel.ask(ask[kernel])  # ranks that have not connected yet lose what they are sent
        ours, theirs, again = [], [], []
        for _ in range(turns):
            theirs += their_kernel.ask(ask[their_kernel])
            ours += our_kernel.ask(ask[our_kernel])
            again += their_kernel.ask(ask[their_kernel])
    what, reference = f"no-op cell, n={RANKS}, beside {name}", statistics.median(theirs + again)
    return Row(what, statistics.median(ours), "ms", reference, "", apart(theirs, again), GOAL)


if __name__ == "__main__":
    print(render([[row] for row in rows()]))
