"""A rank raises, an interrupt, a killed rank: seconds until the kernel is back, state kept."""

import statistics

from tests.benchmarks.kernel import Kernel
from tests.benchmarks.table import Row, render

GOAL_S = 1.0

_RAISE = "%%distributed\nif rank == 1: raise ValueError('planted')\ndist.all_reduce(torch.ones(1))"
_SPIN = "%%distributed\nwhile True: pass"
_WAIT = "%%distributed\nif rank == 1:\n    while True: pass\ndist.all_reduce(torch.ones(1))"
_KILL = (
    "%%distributed\nimport os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    "dist.all_reduce(torch.ones(1))"
)
_CHECK = (
    "%%distributed\nassert kept == 42\n"
    "x = torch.ones(1); dist.all_reduce(x); assert x.item() == world_size"
)


def rows(n: int = 4, rounds: int = 5) -> list[Row]:
    """Return a row a fault. Each is followed by a cell that proves state and group."""
    names = {
        _RAISE: "a rank raises, peers in a collective",
        _SPIN: "interrupt, ranks in Python",
        _WAIT: "interrupt, ranks in a collective",
        _KILL: "a rank is killed: kernel back",
    }
    times: dict[str, list[float]] = {cell: [] for cell in names}
    with Kernel() as kernel:
        kernel.run(f"%load_ext nbdist\n%dist start -n {n} --device cpu")
        kernel.run("%%distributed\nkept = 42")
        for _ in range(rounds):
            for cell in names:
                after = 0.5 if cell in (_SPIN, _WAIT) else None
                _, error, seconds = kernel.run(cell, interrupt_after_s=after)
                assert error in ("RankError", "KeyboardInterrupt"), error
                times[cell].append(seconds)
                if cell == _KILL:
                    kernel.run("%dist restart -r 1")
                    kernel.run("%%distributed -r 1\nkept = 42")
                printed, error, _ = kernel.run(_CHECK)
                assert error is None, printed
    return [
        Row(f"{names[cell]}, n={n}", statistics.median(times[cell]), GOAL_S, "s") for cell in names
    ]


if __name__ == "__main__":
    print(render(rows()))
