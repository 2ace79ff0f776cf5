"""What a fault may leave of a training: where ranks may stand, and whether its cell can end well.

Pure: faults and states in, states out.
"""

from collections.abc import Sequence

from tests.random.acts import DEADLY, NO_FAULT, Fault
from tests.random.shadow import State

_AT_ANY_STEP = ("killed from outside", "interrupt", "interrupt a hang")


def within(fault: Fault, members: Sequence[int], n: int) -> Fault:
    """Return the fault on ranks that there are; none, where all would be struck dead."""
    ranks = tuple(rank for rank in fault.ranks if rank in members)
    if fault.kind == "none" or not ranks:
        return NO_FAULT
    second = fault.second if fault.second is not None and fault.second < n else None
    if fault.kind == "second in the repair" and second is None:
        return NO_FAULT
    if fault.kind in DEADLY and len(ranks) >= n:
        return NO_FAULT
    # Who leaves after a backward leaves no peer waiting, and is rightly a step behind.
    site = "before forward" if fault.kind == "leaves early" else fault.site
    return Fault(fault.kind, ranks, site, fault.step, second, fault.delay_s)


def must_fail(fault: Fault) -> bool:
    """Return whether a cell in which it strikes cannot end well the first time."""
    return fault.kind not in (
        "SIGSTOP, SIGCONT",
        "killed from outside",
        "interrupt",
        "leaves early",
        "mismatch",
    )


def possible(fault: Fault, states: Sequence[State], *, is_first: bool) -> list[State]:
    """Return where ranks may stand together after a fault, of the states before each step."""
    if fault.kind in _AT_ANY_STEP:
        return list(states[fault.step :]) if is_first else list(states[max(0, fault.step - 1) :])
    if not is_first:
        return list(states[max(0, fault.step - 1) : fault.step + 2])
    if fault.site in ("before step", "after step"):
        return list(states[fault.step : fault.step + 2])
    return [states[fault.step]]


def possible_apart(fault: Fault, states: Sequence[State], *, is_first: bool) -> list[State]:
    """Return the states that one rank may have had alone: which another can have lost."""
    return possible(fault, states, is_first=is_first)[1:]
