"""When a snapshot is taken, and whether there is room for it. Pure.

A rank that is told late of a snapshot has none of that step: the others announce it far enough
ahead.
"""

import math

from nbdist.shared.text import name_bytes

INTERVAL_S = 30.0
TIME_SHARE = 0.01
MEMORY_SHARE = 0.5
POLL_S = 1.0


def next_at(taken_at: float, took_s: float) -> float:
    """Return when the next snapshot is due, on the clock of `taken_at`."""
    return taken_at + max(INTERVAL_S, took_s / TIME_SHARE)


def margin(step_s: float) -> int:
    """Return how many steps ahead a snapshot is announced, so that all ranks hear of it in time."""
    return 2 + math.ceil(2 * POLL_S / max(step_s, 1e-4))


def shortest(known_s: float, step_s: float) -> float:
    """Return how short a step may be, from what was known and the newest one.

    By one slow step alone, a snapshot would be announced too late for the fast ones that follow.
    """
    return min(step_s, 1.05 * known_s)


def refusal(size_bytes: int, free_bytes: int, ranks: int) -> str | None:
    """Return why a snapshot of this size is not taken, or None where it is.

    Args:
        size_bytes: What this rank would keep.
        free_bytes: What the machine has left.
        ranks: On this machine; all of them take theirs at the same time.
    """
    if size_bytes * ranks <= MEMORY_SHARE * free_bytes:
        return None
    what = f"{name_bytes(size_bytes * ranks)} on this machine"
    return (
        f"No snapshot of the sharded state is kept: it would take {what}, more than half of the "
        f"{name_bytes(free_bytes)} that are free. Ranks that a fault leaves one step apart "
        "cannot go back together then."
    )
