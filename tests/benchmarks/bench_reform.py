"""How long ranks need to let go of each other and to form the group again: medians in ms.

    python -m tests.benchmarks.bench_reform [RANKS...]

Released: from `abort` to the exception in the rank that waited. Re-formed: the slowest rank's
`reform`, one group, all ranks on this machine. Goal: 50 ms at 4 ranks.
"""

import statistics
import sys
import time

from tests.group import faults
from tests.group.engines import Cluster, cluster

ROUNDS = 30
GOAL_MS = {4: 50.0, 16: 200.0}


def measure(ranks: Cluster, rounds: int = ROUNDS) -> tuple[list[float], list[float]]:
    """Return (released, re-formed) in ms, one number a round."""
    released, reformed = [], []
    waiting = ranks.engines[:-1]
    for generation in range(1, rounds + 1):
        for engine in waiting:
            engine.post(_freed_at)
        while not all(engine.now(faults.main_is_blocked) for engine in waiting):
            time.sleep(0.001)
        asked = ranks.now(_asked_at)
        freed = [engine.result() for engine in waiting]
        released += [1e3 * (at - asked[rank]) for rank, at in enumerate(freed)]
        reformed.append(1e3 * max(r["seconds"] for r in ranks.run(faults.reform, generation)))
    return released, reformed


def _asked_at() -> float:
    """Let go of the peers; return when that was asked for."""
    at = time.monotonic()
    faults.abort()
    return at


def _freed_at() -> float:
    """Wait for a rank that never comes; return when the wait was ended."""
    assert faults.wait_in("all_reduce")["released"]
    return time.monotonic()


def main(sizes: list[int]) -> int:
    """Print a line a size; returns 1 when a goal is missed."""
    missed = 0
    for n in sizes:
        with cluster(n) as ranks:
            released, reformed = measure(ranks)
        median = statistics.median(reformed)
        late = median > GOAL_MS.get(n, float("inf"))
        missed |= late
        print(
            f"{n:2d} ranks: released {statistics.median(released):.1f} ms "
            f"(longest {max(released):.1f}), re-formed {median:.1f} ms "
            f"(longest {max(reformed):.1f}){'  MISSES ITS GOAL' if late else ''}"
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main([int(text) for text in sys.argv[1:]] or [2, 4]))
