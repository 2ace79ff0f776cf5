"""Several hosts over ssh, on hosts made of namespaces: start, cells, a host that dies, stop.

Beside the local start of as many ranks and one login by ssh. Where there can be no such hosts there
are no rows.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial

from tests.benchmarks import bench_cells
from tests.benchmarks.table import Row
from tests.hosts import requirements
from tests.hosts.bed import Bed
from tests.hosts.clusters import during, start
from tests.hosts.kernel import Kernel

_FIRST = "%%distributed\nx = torch.ones(1); dist.all_reduce(x); assert x.item() == world_size"
_MEET = """%%distributed --no-track
import pathlib, time
while not done:
    dist.all_reduce(torch.ones(1000))
    pathlib.Path("{flag}").touch()
    time.sleep(0.02)
"""
_NEVER = "%%distributed --no-track\ndone = False"
_CUT_GOAL_S, _AGAIN_GOAL_S, _STOP_GOAL_S = 5.0, 10.0, 5.0


def rows(rounds: int = 3) -> list[Row]:
    """Return the figures of 6 ranks on 3 hosts; none where the machine cannot have them."""
    if requirements.missing():
        return []
    took: dict[str, list[float]] = {}
    cells: dict[str, list[float]] = {}

    def note(what: str, action: Callable[[], object]) -> None:
        began = time.perf_counter()
        action()
        took.setdefault(what, []).append(time.perf_counter() - began)

    for _ in range(rounds):
        with Bed() as bed:
            for name, times_ms in _start_and_stop(bed, note).items():
                cells.setdefault(name, []).extend(times_ms)
        with Bed() as bed:
            for what, one in _lose(bed).items():
                took.setdefault(what, []).append(one)
    seconds = {what: statistics.median(times) for what, times in took.items()}
    local = seconds["local"] + seconds["login"]
    return [
        Row("start, 3 hosts x 2", seconds["hosts"], "s", local, "6 local ranks + a login", None, 2),
        *bench_cells.compared("no-op cell, 3 hosts x 2", cells),
        _bounded("dead host, until told", seconds["told"], _CUT_GOAL_S),
        _bounded(
            "dead host, until ranks meet again", seconds["again"], _AGAIN_GOAL_S + seconds["torch"]
        ),
        _bounded("nothing left after %dist stop", seconds["stop"], _STOP_GOAL_S),
        _bounded("nothing left after kill -9 of the kernel", seconds["killed"], _STOP_GOAL_S),
    ]


def _bounded(what: str, measured: float, goal: float) -> Row:
    return Row(what, measured, "s", beside="3 hosts", goal=goal, goal_on="measured")


def _start_and_stop(
    bed: Bed, note: Callable[[str, Callable[[], object]], None]
) -> dict[str, list[float]]:
    """Note how long it takes, and return the times of cells on the hosts in between."""
    a = bed["a"]
    times_ms: dict[str, list[float]] = {}
    note("login", lambda: a.run(["ssh", "-o", "BatchMode=yes", "b", "true"]))
    note("torch", lambda: a.run([sys.executable, "-c", "import torch"]))
    for what, command in {
        "local": "%dist start -n 6 --device cpu",
        "hosts": "%dist start --launcher ssh --trust-network --hosts localhost:2,b:2,c:2",
    }.items():
        with Kernel(a) as kernel:
            kernel.run("%load_ext nbdist")
            note(what, partial(_run, kernel, command, _FIRST))
            if what == "local":
                continue
            said = kernel.run(bench_cells.MEASURE.replace("ROUNDS", "20"))
            times_ms = json.loads(said.splitlines()[-1])
            note("stop", partial(_stop, kernel, bed))
    return times_ms


def _stop(kernel: Kernel, bed: Bed) -> None:
    _run(kernel, "%dist stop")
    while any("nbdist.host" in line for line in _left(bed)):
        time.sleep(0.01)


def _lose(bed: Bed) -> dict[str, float]:
    """Return the seconds after a power cut, and after the kernel is killed."""
    with Kernel(bed["a"]) as kernel:
        start(kernel, "localhost:2,b:2,c:2,d:2", "-n 6")
        _run(kernel, _NEVER)
        cut_at: list[float] = []

        def cut() -> None:
            cut_at.append(time.time())
            bed["c"].power_cut()

        both = "\n".join(f"get_ipython().run_cell({cell!r})" for cell in (_MEET, _FIRST))
        _, again_s = during(kernel, bed, both, cut)
        lines = kernel.run("print(open(nbdist.current().events).read())").splitlines()
        events = [json.loads(line) for line in lines if line.startswith("{")]
        ends = [event for event in events if event["event"] == "process ended"]
        told = datetime.fromisoformat(ends[0]["time"]).timestamp() - cut_at[0]
    began = time.perf_counter()  # the kernel was killed when it closed
    while _left(bed):
        time.sleep(0.01)
    return {"told": told, "again": again_s, "killed": time.perf_counter() - began}


def _left(bed: Bed) -> list[str]:
    return [line for name in "abd" for line in bed[name].left_running()]


def _run(kernel: Kernel, *cells: str) -> None:
    for cell in cells:
        said = kernel.run(cell)
        if "Error" in said:
            raise RuntimeError(f"{cell}: {said}")
