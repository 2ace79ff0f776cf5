"""What the tap adds to one collective: processor time against the bare group.

Run as `python -m tests.benchmarks.bench_tap`. Goals: 25 us at "counts", 45 us at "full", nothing
when off; the calls of a step that is told, a dozen a second at most, are shown and have none. One
rank and one element, so that nothing but the overhead is measured, and announcements
as on four ranks; the levels are taken in turn, so that what else the machine does falls on all of
them alike. All threads share one core: where the scheduler gives gloo's thread another one, waking
it alone costs 40 us, bare too, and the medians jump between the two.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.table import Row

GOALS_US = {"off": 0.0, "counts": 25.0, "full": 45.0}
TOLD = "full, told"
ROUNDS = 15
CALLS = 300


def measure() -> dict[str, dict[str, float]]:
    """Return, for each kind of call and level, the added processor time in us (medians)."""
    import torch
    import torch.distributed as dist

    from nbdist.engine.tap import collective_check, counters, in_flight, tap

    _share_one_core()
    memory = memoryview(bytearray(collective_check.size_bytes(4)))
    world = dist.group.WORLD
    assert world is not None
    channel = collective_check.SharedTable(memory, 0, 4).channel(
        "0", "the default group", range(4), "1"
    )
    counters.book_of(world).channel = channel
    x = torch.ones(1)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce, async": lambda: dist.all_reduce(x, async_op=True).wait(),
        "broadcast": lambda: dist.broadcast(x, src=0),
    }
    results: dict[str, dict[str, float]] = {}
    for name, call in calls.items():
        times: dict[str, list[float]] = {level: [] for level in ("bare", *GOALS_US, TOLD)}
        for _ in range(ROUNDS):
            for level in times:
                # Bare and off are the same code on purpose: their difference is the noise.
                tap.set_level({"bare": "off", TOLD: "full"}.get(level, level))
                in_flight.state.is_sampling = level == TOLD
                call()
                began = time.process_time_ns()
                for _ in range(CALLS):
                    call()
                times[level].append((time.process_time_ns() - began) / CALLS / 1e3)
                tap.take()
        medians = {level: statistics.median(values) for level, values in times.items()}
        results[name] = {level: medians[level] - medians["bare"] for level in (*GOALS_US, TOLD)}
        results[name]["bare"] = medians["bare"]
    tap.set_level("off")
    return results


def rows() -> list[Row]:
    """Return what is added to each call at each level that has a goal."""
    from tests.group.harness import run_ranks

    (added,) = run_ranks(1, measure, timeout_s=120)
    return [
        Row(
            f"added to {call} at {level}",
            levels[level],
            "us",
            levels["bare"],
            "bare",
            abs(levels["off"]) / levels["bare"],
            GOALS_US[level],
            "measured",
            is_share=True,
        )
        for call, levels in added.items()
        for level in ("counts", "full")
    ]


def _share_one_core() -> None:
    if hasattr(os, "sched_setaffinity"):
        core = min(os.sched_getaffinity(0))
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


def main() -> int:
    """Print the table; return 1 when a goal is missed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tests.group.harness import run_ranks

    (results,) = run_ranks(1, measure, timeout_s=120)
    missed = []
    for name, row in results.items():
        print(f"{name}: bare {row['bare']:.1f} µs of processor time")
        for level in (*GOALS_US, TOLD):
            ratio, goal = (row["bare"] + row[level]) / row["bare"], GOALS_US.get(level)
            told = "" if goal is None else f"  goal {goal:g} µs"
            print(f"  {level:11}{row[level]:+7.1f} µs  ({ratio:.2f} x){told}")
            if level != "off" and goal is not None and row[level] > goal:
                missed.append(f"{name} at {level}")
    print("All goals met." if not missed else f"Falls short: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
