"""What each of those that watch a step adds to its processor time: DDP on two ranks.

Run as `python -m tests.benchmarks.bench_watch [WIDTH...]`. The ways are taken in turn, many times,
in the same processes, so that what else the machine does falls on all of them alike; told is the
median of what each adds to the bare loop of its round, and between what its quarters lie. Ranks go
before other processes where that is allowed. `bench_step` measures what the product promises; this
one says where to look.
"""

import os
import statistics
import sys
import time
from typing import Any

ROUNDS = 40
SETTLE = 4
WAYS = (
    *("bare", "tap: counts", "tap: full", "tap: full, told"),
    *("hooks", "hooks, measured", "boundary", "all", "all, measured and told"),
)


def measure(width: int) -> dict[str, list[float]]:
    """Return the processor time of a step in us in each round, by way."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from nbdist.engine.kernel.records import Recorder
    from nbdist.engine.steps import step_state
    from nbdist.engine.tap import collective_check, counters, in_flight, tap
    from nbdist.engine.tap.sampling import Measuring, StepSampling
    from nbdist.engine.training import cell, training
    from tests.group.truth import go_first, more_workers

    go_first()
    more_workers()  # they inherit the priority
    memory = memoryview(bytearray(collective_check.size_bytes(2)))
    rank, n = dist.get_rank(), dist.get_world_size()
    counters.begin_generation(collective_check.SharedTable(memory, rank, n))
    ddp = DistributedDataParallel(
        torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 8)
        )
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    x, y = torch.randn(32, width), torch.randint(0, 8, (32,))
    training.here.install(Recorder(dist.get_rank(), lambda batch: None))

    def step() -> None:
        torch.nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    class Sampled(StepSampling):
        is_on = False

        def samples(self, step: int) -> bool:
            return self.is_on

    class Chosen(Measuring):
        is_on = False

        def measures(self, step: int) -> bool:
            return self.is_on

    cell.Measuring = Chosen  # type: ignore[attr-defined]

    def prepare(way: str) -> None:
        is_all = way.startswith("all")
        tap.set_level("full" if is_all or "full" in way else "counts" if "counts" in way else "off")
        training.here.set_enabled(is_all or way.startswith("hooks"))
        step_state.here().remove()
        if is_all or way == "boundary":
            step_state.install(lambda optimizer: (), lambda optimizer, steps: None)
        step_state.begin_cell()
        training.here.begin_cell()
        tap.begin_cell()
        Sampled.is_on = in_flight.state.is_sampling = way.endswith("told")
        Chosen.is_on = "measured" in way
        in_flight.state.stride = Sampled()

    steps = 100 if width < 512 else 20
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(ROUNDS):
        first = number % len(WAYS)
        for way in WAYS[first:] + WAYS[:first]:
            prepare(way)
            for i in range(SETTLE + steps):
                if i == SETTLE:
                    began = time.process_time_ns()
                step()
                if way.startswith("tap"):
                    tap.take(i + 1)
            times[way].append((time.process_time_ns() - began) / steps / 1e3)
            training.here.end_cell()
    return times


def main() -> None:
    """Print a table for each width."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tests.group.harness import run_ranks

    for width in map(int, sys.argv[1:] or ("64", "1024")):
        ranks: list[dict[str, Any]] = run_ranks(2, measure, width, timeout_s=600)
        bare = ", ".join(f"{statistics.median(times['bare']):.0f}" for times in ranks)
        print(f"Width {width}: bare {bare} µs of processor time")
        for way in WAYS[1:]:
            told = []
            for times in ranks:
                added = [a - b for a, b in zip(times[way], times["bare"], strict=True)]
                low, middle, high = statistics.quantiles(added, n=4)
                told.append(f"{middle:+6.0f} ({low:+.0f} to {high:+.0f})")
            print(f"  {way:18}" + "  ".join(f"{text:24}" for text in told))


if __name__ == "__main__":
    main()
